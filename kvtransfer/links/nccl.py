"""Link `nccl`: blocks gathered into a staging buffer, sent through a communicator of two ranks, scattered from another.

Carries out the orders of `nccl_pairs` and reports what became of them. Every operation is watched: NCCL reports errors
by itself only when asked, and a send whose receive never comes spins for ever. Whatever fails or takes too long breaks
its communicator: it is aborted, its streams run dry, and only then is anything said to be over.

Sizes: per communicator two staging buffers and two streams here, and what NCCL takes (50 to 100 MB).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.copy_plan import payload_bytes, plan_gather, plan_scatter
from kvtransfer.gpu.copy_kernel import PieceCopier
from kvtransfer.gpu.device import CudaDevice, CudaUnusable, Stream
from kvtransfer.gpu.device_thread import DeviceThread
from kvtransfer.links.nccl_orders import (
    Abort,
    Broken,
    Build,
    Built,
    Gather,
    Gathered,
    IdMade,
    NcclEvent,
    NcclOrder,
    PairId,
    Receive,
    Received,
    Send,
    Sent,
    Skip,
)
from kvtransfer.links.nccl_pairs import STAGING_BUFFERS

log = logging.getLogger("twinpool.kvtransfer")

ABORT_WITHIN_S = 20.0
"""A communicator that cannot be aborted has hung the device."""
MAX_STUCK_BUILDS = 4
"""Builds that overran their time and still block a thread of their own; NCCL offers no way to call them off."""
_HELLO_BYTES = 16
_FAILURES = (RuntimeError, KeyError)
"""cupy's NcclError is a RuntimeError; for result codes that cupy does not know, its constructor raises KeyError."""


class DeviceHung(RuntimeError):
    """Work on the device neither ends nor can be called off."""


def nccl_version(device: CudaDevice) -> int:
    """As NCCL counts it. Raises CudaUnusable when cupy has no NCCL."""
    nccl = device.cupy.cuda.nccl
    if not nccl.available:
        raise CudaUnusable("cupy found no NCCL library; install nvidia-nccl-cu13, or cu12, as torch does")
    try:
        return int(nccl.get_version())
    except _FAILURES as error:
        raise CudaUnusable(f"NCCL does not answer: {error}") from error


@dataclass
class _Communicator:
    pair: PairId
    stream: Stream
    staging: list[int]
    """Device addresses."""
    nccl: Any = None
    """cupy's NcclCommunicator; None while it is built and once it is aborted."""
    is_broken: bool = False
    free: list[int] = field(default_factory=list)  # staging buffers not in use
    gathered: dict[int, tuple[int, int]] = field(default_factory=dict)  # fetch id -> staging buffer, bytes
    receives: deque[Receive] = field(default_factory=deque)  # announced, waiting for a staging buffer
    receiving: dict[int, Receive] = field(default_factory=dict)  # by fetch id; not yet reported


class NcclLink:
    """Orders may be given by one thread, `events` be taken by it; the rest happens in the device's thread."""

    def __init__(
        self,
        device: CudaDevice,
        thread: DeviceThread,
        copier: PieceCopier,
        staging_bytes: int,
        build_within_s: float,
        move_within_s: float,
        on_event: Callable[[], None],
    ) -> None:
        self.events: deque[NcclEvent] = deque()
        self._device = device
        self._thread = thread
        self._copier = copier
        self._staging_bytes = staging_bytes
        self._build_within_s = build_within_s
        self._move_within_s = move_within_s
        self._on_event = on_event
        self._library = device.cupy.cuda.nccl
        self._communicators: dict[PairId, _Communicator] = {}
        self._num_stuck = 0
        self._spare_buffers: list[int] = []
        """Kept for the next communicator: freeing device memory waits for everything that runs on the device."""

    def execute(self, order: NcclOrder) -> None:
        """From any thread; in the order of the calls."""
        self._thread.post(lambda: self._execute(order))

    def close(self) -> None:
        """From any thread: abort everything."""
        self._thread.post(self._break_all)

    def _break_all(self) -> None:
        for it in list(self._communicators.values()):
            self._break(it, "this rank is shutting down")

    def _report(self, event: NcclEvent) -> None:
        self.events.append(event)
        self._on_event()

    def _execute(self, order: NcclOrder) -> None:
        if isinstance(order, Build):
            self._build(order)
            return
        it = self._communicators.get(order.pair)
        if it is None or it.is_broken:
            if isinstance(order, Receive):
                self._report(_received(order, "the communicator broke before"))
            return
        match order:
            case Abort(_, reason):
                self._break(it, reason)
            case Gather():
                self._gather(it, order)
            case Send(_, fetch_id):
                self._send(it, fetch_id)
            case Skip(_, fetch_id):
                it.free.append(it.gathered.pop(fetch_id)[0])
            case Receive():
                it.receives.append(order)
                self._receive(it)

    # Building, in a thread of its own: joining blocks until the other side joins too.

    def _build(self, order: Build) -> None:
        pair = order.pair
        if self._num_stuck >= MAX_STUCK_BUILDS:
            self._report(Broken(pair, f"{self._num_stuck} communicators are still being built since long ago"))
            return
        try:
            unique_id = order.unique_id
            if not unique_id:
                unique_id = _id_to_wire(self._library.get_unique_id())
                self._report(IdMade(pair, unique_id))
            it = self._prepare(pair)
        except (*_FAILURES, ValueError) as error:
            self._report(Broken(pair, f"no communicator can be prepared: {error}"))
            return
        self._communicators[pair] = it
        until_s = time.monotonic() + self._build_within_s
        has_ended = threading.Event()
        is_late = threading.Event()

        def check_time() -> None:
            if not has_ended.is_set():
                is_late.set()
                self._num_stuck += 1
                self._fail(it, f"the other side did not join within {self._build_within_s:g} s")

        def join() -> None:
            communicator, reason = None, ""
            try:
                self._device.use()
                communicator = self._library.NcclCommunicator(2, self._id_from_wire(unique_id), _rank(pair))
                self._exchange_hello(communicator, it, until_s)
            except Exception as error:  # noqa: BLE001  whatever it is, the pair goes on without this communicator
                reason = f"{type(error).__name__}: {error}"
            has_ended.set()
            self._thread.post(lambda: self._joined(it, communicator, reason, is_late.is_set()))

        self._thread.at(until_s, check_time)
        threading.Thread(target=join, name="kv-nccl-join", daemon=True).start()

    def _prepare(self, pair: PairId) -> _Communicator:
        while len(self._spare_buffers) < STAGING_BUFFERS:
            self._spare_buffers.append(self._device.allocate(self._staging_bytes))
        staging = [self._spare_buffers.pop() for _ in range(STAGING_BUFFERS)]
        return _Communicator(pair, self._device.new_stream(), staging, free=list(range(STAGING_BUFFERS)))

    def _exchange_hello(self, communicator: Any, it: _Communicator, until_s: float) -> None:
        """NCCL connects two ranks on their first message, and allocates for it: have that now. Raises on failure."""
        move = communicator.send if it.pair.is_exporter else communicator.recv
        move(it.staging[0], _HELLO_BYTES, self._library.NCCL_UINT8, 1 - _rank(it.pair), it.stream.ptr)
        event = self._device.record(it.stream)
        while not event.done:
            communicator.check_async_error()
            if time.monotonic() >= until_s:
                raise CudaUnusable("the first message did not come through in time")
            time.sleep(1e-3)

    def _joined(self, it: _Communicator, communicator: Any, reason: str, is_late: bool) -> None:
        if is_late:
            self._num_stuck -= 1
        it.nccl = communicator
        if it.is_broken:
            self._abort(it)
        elif reason:
            self._fail(it, f"the communicator could not be built: {reason}")
        else:
            log.info("communicator_built generation=%d is_exporter=%s", it.pair.generation, it.pair.is_exporter)
            self._report(Built(it.pair))

    # Moving blocks.

    def _gather(self, it: _Communicator, order: Gather) -> None:
        num_bytes = payload_bytes(len(order.block_ids), order.regions)
        if not it.free or num_bytes > self._staging_bytes:
            self._fail(it, f"a fetch of {num_bytes} bytes found {len(it.free)} buffers of {self._staging_bytes}")
            return
        buffer = it.free.pop(0)
        it.gathered[order.fetch_id] = (buffer, num_bytes)

        def gathered(reason: str) -> None:
            if reason:
                raise DeviceHung(f"Gathering {num_bytes} bytes: {reason}.")
            if not it.is_broken:
                self._report(Gathered(it.pair, order.fetch_id))

        event = self._copier.copy(plan_gather(order.block_ids, order.regions, it.staging[buffer]))
        self._thread.when_done(event, gathered, ABORT_WITHIN_S)

    def _send(self, it: _Communicator, fetch_id: int) -> None:
        buffer, num_bytes = it.gathered[fetch_id]

        def sent(reason: str) -> None:
            if reason:
                self._fail(it, f"a send of {num_bytes} bytes failed: {reason}")
            elif not it.is_broken:
                it.free.append(buffer)
                del it.gathered[fetch_id]
                self._report(Sent(it.pair, fetch_id))

        self._post(it, it.nccl.send, it.staging[buffer], num_bytes, sent)

    def _receive(self, it: _Communicator) -> None:
        """Post what was announced, in that order, as staging buffers get free."""
        while it.receives and it.free and not it.is_broken:
            order = it.receives.popleft()
            it.receiving[order.fetch_id] = order
            self._receive_into(it, order, it.free.pop(0))

    def _receive_into(self, it: _Communicator, order: Receive, buffer: int) -> None:
        started_s = time.monotonic()

        def ended(reason: str) -> None:
            if reason:
                raise DeviceHung(f"Scattering {order.num_bytes} bytes: {reason}.")
            if not it.is_broken:
                it.free.append(buffer)
                del it.receiving[order.fetch_id]
                self._report(_received(order, "", started_s))
                self._receive(it)

        def arrived(reason: str) -> None:
            if reason:
                self._fail(it, f"a receive of {order.num_bytes} bytes failed: {reason}")
            elif it.is_broken:
                return  # an aborted receive ends too, with anything in its buffer
            elif order.block_ids:
                plan = plan_scatter(order.block_ids, order.regions, it.staging[buffer])
                self._thread.when_done(self._copier.copy(plan), ended, ABORT_WITHIN_S)
            else:
                ended("")

        self._post(it, it.nccl.recv, it.staging[buffer], order.num_bytes, arrived)

    def _post(
        self, it: _Communicator, move: Callable[..., None], address: int, num_bytes: int, then: Callable[[str], None]
    ) -> None:
        def failing() -> str:
            if it.is_broken:
                return "the communicator broke"
            try:
                it.nccl.check_async_error()
            except _FAILURES as error:
                return str(error)
            return ""

        try:
            move(address, num_bytes, self._library.NCCL_UINT8, 1 - _rank(it.pair), it.stream.ptr)
        except _FAILURES as error:
            self._fail(it, str(error))
            return
        self._thread.when_done(self._device.record(it.stream), then, self._move_within_s, failing)

    # Breaking.

    def _fail(self, it: _Communicator, reason: str) -> None:
        if not it.is_broken:
            self._report(Broken(it.pair, reason))
            self._break(it, reason)

    def _break(self, it: _Communicator, reason: str) -> None:
        if it.is_broken:
            return
        it.is_broken = True
        log.warning("communicator_dropped generation=%d reason=%r", it.pair.generation, reason)
        for order in it.receives:
            it.receiving[order.fetch_id] = order
        it.receives.clear()
        if it.nccl is not None:
            self._abort(it)
        # Otherwise it is still being built; `_joined` aborts it as soon as it can.

    def _abort(self, it: _Communicator) -> None:
        """Aborting waits for NCCL's kernels to leave, so it has a thread of its own."""
        if it.nccl is None:
            self._run_dry(it)
            return
        communicator, it.nccl = it.nccl, None
        has_ended = threading.Event()

        def abort() -> None:
            reason = ""
            try:
                self._device.use()
                communicator.abort()
            except Exception as error:  # noqa: BLE001  reported below
                reason = str(error)
            has_ended.set()
            if reason:
                log.warning("communicator_abort_failed reason=%r", reason)
            self._thread.post(lambda: self._run_dry(it))

        def check_time() -> None:
            if not has_ended.is_set():
                raise DeviceHung(f"A communicator could not be aborted within {ABORT_WITHIN_S:g} s.")

        self._thread.at(time.monotonic() + ABORT_WITHIN_S, check_time)
        threading.Thread(target=abort, name="kv-nccl-abort", daemon=True).start()

    def _run_dry(self, it: _Communicator) -> None:
        """Nothing more is put into its streams; when they are empty, its buffers and its blocks are free."""

        def copier_is_dry(reason: str) -> None:
            if reason:
                raise DeviceHung(f"The copies of an aborted communicator do not end: {reason}.")
            self._spare_buffers += it.staging
            for order in it.receiving.values():
                self._report(_received(order, "the communicator broke"))
            self._communicators.pop(it.pair, None)

        def stream_is_dry(reason: str) -> None:
            if reason:
                raise DeviceHung(f"An aborted communicator does not leave its stream: {reason}.")
            self._thread.when_done(self._device.record(self._copier.stream), copier_is_dry, ABORT_WITHIN_S)

        self._thread.when_done(self._device.record(it.stream), stream_is_dry, ABORT_WITHIN_S)

    def _id_from_wire(self, unique_id: bytes) -> bytes | tuple[int, ...]:
        """cupy 14 wants bytes; before, it was a tuple of signed numbers."""
        if hasattr(self._library, "NcclConfig"):
            return unique_id
        return tuple(byte - 256 if byte > 127 else byte for byte in unique_id)


def _rank(pair: PairId) -> int:
    return 0 if pair.is_exporter else 1


def _id_to_wire(unique_id: bytes | tuple[int, ...]) -> bytes:
    return unique_id if isinstance(unique_id, bytes) else bytes(byte & 0xFF for byte in unique_id)


def _received(order: Receive, reason: str, started_s: float | None = None) -> Received:
    now_s = time.monotonic()
    return Received(order.pair, order.fetch_id, reason, 0.0 if started_s is None else now_s - started_s, now_s)
