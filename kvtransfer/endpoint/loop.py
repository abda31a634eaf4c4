"""The thread that owns a rank's sockets: waits, receives, lets `Exporter` and `Importer` decide, and sends.

It sleeps in one poll over all sockets, the wake-up descriptor and the process descriptors of importers. A timeout is
set only while transfers are open.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from kvtransfer.copy_plan import payload_bytes
from kvtransfer.endpoint.copy_threads import Copier, CopyThreads
from kvtransfer.endpoint.exporting.exporter import Exporter
from kvtransfer.endpoint.frames import BadFrame, encode, from_exporter, from_importer
from kvtransfer.endpoint.host_reports import HostReports
from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.endpoint.peers import PeerKey, RankIdentity
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.endpoint.sockets import PeerSocket, Wakeup, bind_exporter, waiting_messages
from kvtransfer.gpu.gpu_links import GpuLinks
from kvtransfer.host_messages import RankStats
from kvtransfer.layout import CacheMap, Region
from kvtransfer.links.host_memory import why_unreadable
from kvtransfer.links.zmq_frames import BlockMemory, HostMemory, keep_freed_messages
from kvtransfer.links.zmq_in_place import FrameInPlace
from kvtransfer.messages import Blocks, Fetch
from kvtransfer.transfers.export import ClosedExport
from kvtransfer.transfers.imports import ClosedImport, Piece
from kvtransfer.transfers.lease import IllegalTransition
from kvtransfer.trust.key import read_key
from kvtransfer.verification.check_thread import CheckThread

log = logging.getLogger("twinpool.kvtransfer")

_SWEEP_S = 0.1
"""How exactly deadlines are kept while transfers are open."""
_FETCHES_PER_TURN = 4
"""Served before looking at the sockets again."""

Command = Callable[[float], None]
"""Called with the time, in monotonic seconds."""


class _LocalMemory:
    def __init__(self, blocks: BlockMemory) -> None:
        self._blocks = blocks

    def why_unreadable(self, pid: int, address: int) -> str:
        return why_unreadable(pid, address)

    def scatter(self, piece: Piece, targets: Sequence[Region], payload: memoryview) -> None:
        self._blocks.scatter(payload, piece.target_ids, targets)


class EndpointLoop:
    """Built by the engine's thread, run by its own. `commands` is the only way in, `on_closed` the only way out."""

    def __init__(
        self,
        settings: EndpointSettings,
        cache: CacheMap,
        identity: RankIdentity,
        on_closed: Callable[[list[ClosedExport], list[ClosedImport]], None],
        wakeup: Wakeup,
        gpu: GpuLinks | None = None,
    ) -> None:
        """`gpu`: for a cache on a GPU; it wakes the loop through `wakeup`."""
        self.commands: deque[Command] = deque()
        self.wakeup = wakeup
        self.bad_frames = 0
        if "zmq" in settings.links:
            keep_freed_messages()
        self.exporter = Exporter(settings, cache, identity)
        self._largest_payload = max(settings.chunk_bytes, *cache.layout.layer_bytes)
        self._blocks: BlockMemory = gpu.memory if gpu else HostMemory()
        self.importer = Importer(settings, cache, identity, _LocalMemory(self._blocks))
        self._gpu = gpu
        self._settings = settings
        self._on_closed = on_closed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._key = read_key(Path(settings.key_file)) if settings.key_file else None
            self._router, self.address, self._door = bind_exporter(self._context, settings, self._key)
            self._reports = HostReports(
                self._context, settings, cache, identity, self.address, self.exporter, self.importer, self._key
            )
        except BaseException:
            self._context.destroy(linger=0)
            self.wakeup.close()
            raise
        self._peers: dict[PeerKey, PeerSocket] = {}
        self._pidfds: dict[int, str] = {}  # process descriptor of an importer -> its epoch
        self._copier: Copier = gpu or CopyThreads(f"kv-copy-{settings.rank}", self.wakeup.set)
        open_memory = gpu.open_memory if gpu else HostMemory
        self._checker = CheckThread(
            f"kv-check-{settings.rank}", open_memory, settings.chunk_bytes, on_result=self.wakeup.set
        )
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self.wakeup.fd, zmq.POLLIN)
        for socket in (*self._door.sockets, *filter(None, [self._reports.socket])):
            self._poller.register(socket, zmq.POLLIN)
        self._next_sweep_s = 0.0
        self._is_stale = False  # something happened since the last refresh of the statistics
        self._stop_by_s: float | None = None

    def post(self, command: Command) -> None:
        """From any thread: have it called by the endpoint's thread."""
        self.commands.append(command)
        self.wakeup.set()

    def stop(self, by_s: float) -> None:
        """From any thread: end every transfer and return from `run`, at the latest then."""

        def begin_stop(now_s: float) -> None:
            self._stop_by_s = by_s
            self.importer.cancel_all(now_s)
            self.exporter.abort_all(now_s, "the exporter is shutting down")

        self.post(begin_stop)

    @property
    def stats(self) -> RankStats:
        return self._reports.current

    def run(self) -> None:
        """Until stopped; raises what nobody expected, after closing everything."""
        try:
            self._reports.started()
            while not self._is_stopped():
                events = dict(self._poller.poll(self._timeout_ms()))
                now_s = time.monotonic()
                self._is_stale |= bool(events)
                self.wakeup.clear()
                self._run_commands(now_s)
                if any(socket in events for socket in self._door.sockets):
                    self._door.attend()
                self._receive(events, now_s)
                self._collect_copies(now_s)
                if now_s >= self._next_sweep_s:
                    self._next_sweep_s = now_s + _SWEEP_S
                    self.exporter.sweep(now_s)
                    self.importer.sweep(now_s)
                    self._reports.refresh(now_s, self.bad_frames, self._door.refused)
                    self._is_stale = False
                self.importer.pump(now_s)
                self._flush()
                self._serve_fetches()
            self.exporter.close_all()
            self._flush()
            if self._close_copier():
                self._collect_copies(time.monotonic())  # their imports may close now
                self._flush()
            self._close(linger_ms=100)  # the last releases and failures may still leave
        except BaseException:
            self._close_copier()
            self._close(linger_ms=0)
            raise

    def _is_stopped(self) -> bool:
        if self._stop_by_s is None:
            return False
        return self.importer.num_open + self.exporter.num_open == 0 or time.monotonic() >= self._stop_by_s

    def _timeout_ms(self) -> int | None:
        if self.exporter.has_fetches or self.commands:
            return 0
        if (
            self.exporter.needs_sweep
            or self.importer.needs_sweep
            or self._reports.is_due
            or self._is_stale
            or self._stop_by_s is not None
        ):
            return int(max(0.0, self._next_sweep_s - time.monotonic()) * 1000) + 1
        return None

    def _run_commands(self, now_s: float) -> None:
        while self.commands:
            command = self.commands.popleft()
            try:
                command(now_s)
            except IllegalTransition as error:
                log.error("command_refused reason=%r", str(error))

    def _receive(self, events: dict[object, int], now_s: float) -> None:
        if self._router in events:
            for frames in waiting_messages(self._router):
                self._from_importer(frames, now_s)
        for key, peer in list(self._peers.items()):
            if peer.socket in events:
                for frames in waiting_messages(peer.socket):
                    self._from_exporter(key, frames, now_s)
            if peer.monitor in events and peer.was_disconnected():
                self.importer.exporter_lost(key, "the connection closed")
        if self._reports.socket in events:
            self.bad_frames += self._reports.receive(now_s)
        for pidfd in [fd for fd in self._pidfds if fd in events]:
            self._poller.unregister(pidfd)
            os.close(pidfd)
            self.exporter.importer_died(self._pidfds.pop(pidfd))

    def _from_importer(self, frames: list[zmq.Frame], now_s: float) -> None:
        importer = frames[0].bytes
        try:
            if len(frames) != 2:
                raise BadFrame(f"{len(frames) - 1} frames where one was expected")
            self.exporter.receive(now_s, importer, from_importer(frames[1].buffer))
        except BadFrame as error:
            self._count_bad_frame(error)
        for epoch, pid in self.exporter.welcomed:
            self._watch(epoch, pid)
        self.exporter.welcomed.clear()

    def _from_exporter(self, key: PeerKey, frames: list[zmq.Frame], now_s: float) -> None:
        try:
            if len(frames) > 2:
                raise BadFrame(f"{len(frames)} frames where at most two were expected")
            payload = frames[1].buffer if len(frames) == 2 else None
            self.importer.receive(now_s, key, from_exporter(frames[0].buffer), payload)
        except BadFrame as error:
            self._count_bad_frame(error)

    def _count_bad_frame(self, error: BadFrame) -> None:
        self.bad_frames += 1
        log.warning("bad_frame rank=%d reason=%r", self._settings.rank, str(error))

    def _collect_copies(self, now_s: float) -> None:
        if self._copier.error:
            raise RuntimeError(f"a copy thread of rank {self._settings.rank} died") from self._copier.error
        while self._copier.results:
            self.importer.copied(self._copier.results.popleft())
        if self._checker.error:
            raise RuntimeError(f"the check thread of rank {self._settings.rank} died") from self._checker.error
        while self._checker.results:
            result = self._checker.results.popleft()
            if result.job.importer is None:
                self.importer.checked(now_s, result)
            else:
                self.exporter.checked(result)
        if self._gpu:
            self._collect_from_gpu(self._gpu, now_s)

    def _collect_from_gpu(self, gpu: GpuLinks, now_s: float) -> None:
        while gpu.mappings:
            mapping = gpu.mappings.popleft()
            self.importer.mapped(now_s, mapping.key, mapping.layers, mapping.reason)
        while gpu.nccl_events:
            event = gpu.nccl_events.popleft()
            if event.pair.is_exporter:
                self.exporter.nccl_event(event)
            else:
                self.importer.nccl_event(now_s, event)

    def _serve_fetches(self) -> None:
        for _ in range(_FETCHES_PER_TURN):
            if not (served := self.exporter.next_fetch()):
                break
            importer, fetch = served
            if self.exporter.sends_through_nccl(importer):
                self.exporter.nccl.gather(time.monotonic(), importer, fetch)
            else:
                self._send_blocks(importer, fetch)
        if self._gpu:
            self._order_from_gpu(self._gpu)

    def _order_from_gpu(self, gpu: GpuLinks) -> None:
        for wanted in self.importer.mappings:
            gpu.map_memory(wanted.key, wanted.allocations, wanted.layers)
        self.importer.mappings.clear()
        for orders in (self.exporter.nccl.orders, self.importer.nccl.orders):
            for order in orders:
                gpu.execute(order)
            orders.clear()

    def _send_blocks(self, importer: bytes, fetch: Fetch) -> None:
        """The engine may preempt the prefill meanwhile: the importer trusts nothing before `Done` confirms it."""
        regions = self.exporter.regions(importer, fetch)
        payload = FrameInPlace(payload_bytes(len(fetch.block_ids), regions))
        self._blocks.gather_into(payload.array, fetch.block_ids, regions)
        header = encode(Blocks(fetch.transfer_id, fetch.fetch_id, payload.array.nbytes))
        self._router.send_multipart([importer, header], zmq.SNDMORE)
        payload.send(self._router)

    def _flush(self) -> None:
        """Carry out what was decided, in the order in which it was."""
        for key in self.importer.lost:
            if self._gpu:
                self._gpu.forget(key)
            if peer := self._peers.pop(key, None):
                self._poller.unregister(peer.socket)
                self._poller.unregister(peer.monitor)
                peer.close(linger_ms=0)
        for job in self.importer.copies:
            self._copier.submit(job)
        for check in (*self.importer.checks.jobs, *self.exporter.checks.jobs):
            self._checker.submit(check)
        for key, from_us in self.importer.outbox[:]:
            if peer := self._peer(key):
                peer.socket.send(encode(from_us))
        for importer, to_importer in self.exporter.outbox:
            self._router.send_multipart([importer, encode(to_importer)])
        exports, imports = self.exporter.closed[:], self.importer.closed[:]
        self._reports.events(self.exporter.started, imports)
        for done in (
            self.importer.lost, self.importer.copies, self.importer.outbox, self.importer.closed,
            self.exporter.outbox, self.exporter.closed, self.exporter.started,
            self.importer.checks.jobs, self.exporter.checks.jobs,
        ):  # fmt: skip
            done.clear()
        if exports or imports:
            self._on_closed(exports, imports)

    def _peer(self, key: PeerKey) -> PeerSocket | None:
        """The socket to an exporter, opened when first needed; None if its address is no address."""
        if key in self._peers:
            return self._peers[key]
        try:
            peer = PeerSocket(self._context, key.address, self._settings, self._largest_payload, self._key)
        except zmq.ZMQError as error:
            self.importer.exporter_lost(key, f"cannot connect: {error.strerror}")
            self.wakeup.set()  # what that decided goes out in the next turn
            return None
        self._peers[key] = peer
        self._poller.register(peer.socket, zmq.POLLIN)
        self._poller.register(peer.monitor, zmq.POLLIN)
        return peer

    def _watch(self, epoch: str, pid: int) -> None:
        """Learn at once when an importer on this machine dies: it cannot be reading our memory any more."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.exporter.importer_died(epoch)
            return
        except OSError as error:  # without it the lease decides
            log.info("importer_not_watched pid=%d reason=%r", pid, str(error))
            return
        self._pidfds[pidfd] = epoch
        self._poller.register(pidfd, zmq.POLLIN)

    def _close_copier(self) -> bool:
        """After the copies under way; False if they take too long."""
        is_quiet = self._copier.close(timeout_s=1.0)
        if not is_quiet:
            log.error("copy_thread_stuck rank=%d", self._settings.rank)
        return is_quiet

    def _close(self, linger_ms: int) -> None:
        if not self._checker.close(timeout_s=1.0):
            log.error("check_thread_stuck rank=%d", self._settings.rank)
        for peer in self._peers.values():
            peer.close(linger_ms)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._reports.close(linger_ms)
        self._door.close()
        self._router.close(linger_ms)
        self._context.term()
