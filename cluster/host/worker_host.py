"""The process around one engine: takes requests from the proxy, gives back outputs, reports load, notices death.

A host is either whole or gone: when its engine, its ranks' channel or any of its tasks fails, it says
`Goodbye` with the cause and exits, and the proxy acts on that.

SIGTERM drains it, as `Drain` of a proxy does: it finishes what it has and leaves (`host/drain.py` says when). SIGINT,
and a second SIGTERM, end it at once.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
import uuid
from collections import deque
from typing import Any, NoReturn

import msgspec
import psutil
import uvloop
import zmq
import zmq.asyncio

from cluster import messages as wire
from cluster.frames import BadFrame, reader
from cluster.host.drain import Carried
from cluster.host.drain_watch import DrainWatch
from cluster.host.leaving import WorkerStopped, first_error
from cluster.host.load_report import transfers_open, worker_load
from cluster.host.rank_channel import RankChannel
from cluster.host.slumber import Slumber
from cluster.host.stepping_back import step_back
from cluster.host.vllm_engine import Engine, EngineLost, RequestUnreadable, cache_event_config, engine_config
from cluster.launch.logs import start_log
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.relay import CacheRelay
from cluster.prefix_events.teller import CacheTeller
from cluster.trust import call_with_key, write_key
from cluster.worker_settings import WorkerSettings
from kvtransfer.host_messages import (
    DropExports,
    ExportStarted,
    FirstToken,
    FromRank,
    HoldExports,
    ImportClosed,
    MeetExporters,
)

log = logging.getLogger("twinpool.worker")

MAX_REMEMBERED_EXPORTS = 10_000

OUTBOX_S = 1.0
ENGINE_STOP_S = 1.5
"""An engine has nothing to save; its interpreters take five seconds each to unload what they imported."""


class WorkerHost:
    """One worker. `run` returns the exit code."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._epoch = uuid.uuid4().hex
        self._context = zmq.asyncio.Context()
        self._ranks = RankChannel(self._context, settings.report_address, self._on_rank_event)
        self._proxy = self._context.socket(zmq.DEALER)
        self._proxy.setsockopt(zmq.LINGER, 500)  # time for a last Goodbye
        self._proxy.setsockopt(zmq.IDENTITY, f"{settings.worker_id}.{self._epoch}".encode())
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._encoder = msgspec.msgpack.Encoder()
        self._read_frame = reader(msgspec.msgpack.Decoder[wire.ToWorker](wire.ToWorker))
        self._engine: Engine | None = None
        self._cache_teller = CacheTeller(self._epoch, self._tell_proxy)
        self._stop = asyncio.Event()
        self._drain = DrainWatch(
            settings.worker_id, settings.role, self._carried, self._say_hello, self._drop_everything
        )
        self._slumber = Slumber(
            settings.worker_id, self._carried, self._call_engine, self._tell_proxy, self._cache_teller.engine_was_reset
        )
        self._last_work_s = -math.inf
        self._ranks_complete = asyncio.Event()
        self._at_work = False
        """The engine is up."""
        self._active: set[str] = set()
        self._exports: deque[str] = deque(maxlen=MAX_REMEMBERED_EXPORTS)
        self._proxy_epoch = ""
        self._proxy_heard_at_s = 0.0
        self._proxies_lost = 0
        self._num_ranks = 0
        self._num_running = 0
        self._num_waiting = 0
        self._bad_frames = 0

    @classmethod
    async def start_and_run(cls, settings: WorkerSettings) -> int:
        """Sockets belong to the running loop, so the host is made inside it."""
        return await cls(settings).run()

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        cause, exit_code = "stopped", 0
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._leave_when_told())
                tasks.create_task(self._ranks.run())
                tasks.create_task(self._work(tasks))
        except* WorkerStopped as group:
            first = first_error(group)
            assert isinstance(first, WorkerStopped)
            cause, exit_code = first.cause, first.exit_code
        except* EngineLost as group:
            cause, exit_code = str(first_error(group)), 1
        except* Exception as group:
            error = first_error(group)
            cause, exit_code = f"{type(error).__name__}: {error}", 1
            log.exception("worker_failed worker=%s", self._settings.worker_id, exc_info=error)
        log.info("worker_leaving worker=%s cause=%s", self._settings.worker_id, cause)
        await self._close(cause)
        return exit_code

    async def _leave_when_told(self) -> None:
        await self._stop.wait()
        raise WorkerStopped("told to stop", 0)

    def _on_sigterm(self) -> None:
        if not self._at_work or self._drain.goal == wire.LEAVE:
            self._stop.set()
        else:
            self._drain.order(wire.LEAVE, self._settings.drain_timeout_s)

    async def _leave_when_drained(self) -> None:
        cause = await self._drain.run()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._outbox.join(), OUTBOX_S)  # what it has said comes before its Goodbye
        raise WorkerStopped(cause, 0)

    def _carried(self) -> Carried:
        return Carried(len(self._active), transfers_open(self._ranks), self._last_work_s, bool(self._proxy_epoch))

    def _worked(self) -> None:
        self._last_work_s = time.monotonic()
        self._drain.nudge()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start_engine()
        except TimeoutError as error:
            raise WorkerStopped(
                f"the engine was not up within start_timeout_s={self._settings.start_timeout_s:g}; raise it, or see "
                "this worker's log for what takes so long",
                1,
            ) from error
        call_with_key(self._proxy, self._settings.proxy_address, self._settings.key)
        self._proxy.connect(self._settings.proxy_address)
        tasks.create_task(self._send_to_proxy())
        tasks.create_task(self._read_proxy())
        tasks.create_task(self._beat())
        tasks.create_task(self._pump_outputs())
        tasks.create_task(self._leave_when_drained())
        tasks.create_task(self._slumber.run())
        self._at_work = True
        if self._engine is not None and (facts := self._engine.facts).prefix_events:
            cached = CachedBlocks(facts.block_size, facts.num_blocks)
            addresses = (self._settings.event_address, self._settings.replay_address)
            tasks.create_task(CacheRelay(self._context, *addresses, cached, self._cache_teller).run())

    async def _start_engine(self) -> None:
        settings = self._settings
        events = cache_event_config(settings.event_address, settings.replay_address) if settings.prefix_events else None
        config = await asyncio.to_thread(
            engine_config, settings.model, settings.engine, self._connector_settings(), events
        )
        self._engine = await Engine.start(config)
        self._num_ranks = config.parallel_config.world_size
        self._check_ranks_complete()
        await self._ranks_complete.wait()

    def _connector_settings(self) -> dict[str, Any]:
        key = self._settings.key
        return {
            "worker_id": self._settings.worker_id,
            "key_file": str(write_key(self._settings.key_file, key)) if key is not None else "",
            "bind": self._settings.rank_bind,
            "report_to": self._settings.report_address,
            "chunk_order": self._settings.chunk_order,
            "itl_s": self._settings.itl_s,
            **self._settings.transfer.model_dump(exclude={"bind_host"}),
        }

    async def _close(self, cause: str) -> None:
        if self._proxy_heard_at_s:
            goodbye = wire.Goodbye(self._settings.worker_id, self._epoch, cause)
            try:
                await asyncio.wait_for(self._proxy.send_multipart([self._encoder.encode(goodbye)]), 0.5)
            except (TimeoutError, zmq.ZMQError) as error:
                log.warning("goodbye_not_sent worker=%s error=%s", self._settings.worker_id, error)
        if self._engine is not None:
            await self._engine.stop(min(ENGINE_STOP_S, self._settings.stop_timeout_s))
        self._ranks.close()
        self._proxy.close()
        self._context.term()

    # --- ranks -----------------------------------------------------------------------------------

    def _check_ranks_complete(self) -> None:
        if self._num_ranks and len(self._ranks.ready) >= self._num_ranks:
            self._ranks_complete.set()

    def _on_rank_event(self, message: FromRank) -> None:
        match message:
            case ExportStarted():
                self._exports.append(message.transfer_id)
                self._tell_proxy(wire.PrefillStarted(message.transfer_id))
            case ImportClosed():
                self._tell_proxy(wire.HandoverClosed(**msgspec.structs.asdict(message)))
            case _:
                self._check_ranks_complete()
                self._drain.nudge()

    # --- proxy -----------------------------------------------------------------------------------

    def _tell_proxy(self, message: wire.FromWorker, frames: list[Any] | None = None) -> None:
        self._outbox.put_nowait([self._encoder.encode(message), *(frames or ())])

    async def _send_to_proxy(self) -> None:
        """The only writer of the proxy socket while the host is at work."""
        while True:
            frames = await self._outbox.get()
            await self._proxy.send_multipart(frames, copy=False)
            self._outbox.task_done()

    async def _read_proxy(self) -> None:
        while True:
            frames = await self._proxy.recv_multipart()
            self._proxy_heard_at_s = time.monotonic()
            try:
                message = self._read_frame(frames[0])
            except BadFrame as error:
                self._bad_frames += 1
                log.warning("bad_proxy_frame worker=%s error=%s", self._settings.worker_id, error)
                continue
            await self._obey(message, frames[1:])

    async def _obey(self, message: wire.ToWorker, frames: list[bytes]) -> None:
        assert self._engine is not None
        match message:
            case wire.Submit(engine_request_id=request_id):
                await self._submit(request_id, frames)
            case wire.Abort(engine_request_ids=request_ids):
                self._active.difference_update(request_ids)
                self._worked()
                await self._engine.abort(request_ids)
            case wire.FirstToken(transfer_id=transfer_id, token=token):
                await self._ranks.tell_all(FirstToken(transfer_id, token))
            case wire.MeetExporters(workers=workers):
                addresses = [[(rank.address, rank.epoch) for rank in ranks] for ranks in workers]
                await self._ranks.tell_all(MeetExporters(addresses))
            case wire.DropTransfers(transfer_ids=transfer_ids):
                await self._ranks.tell_all(DropExports(transfer_ids))
            case wire.HoldTransfers(transfer_ids=transfer_ids):
                await self._ranks.tell_all(HoldExports(transfer_ids))
            case wire.TellCachedBlocks():
                self._cache_teller.begin()
            case wire.Utility():
                if not self._slumber.takes(message):
                    await self._utility(message)
            case wire.Drain(goal=goal, timeout_s=timeout_s):
                self._drain.order(goal, timeout_s)
            case wire.NothingMore(drain=number):
                self._drain.nothing_more(number)
            case wire.Welcome(proxy_epoch=epoch):
                if self._proxy_epoch and epoch != self._proxy_epoch:
                    await self._forget_proxy("another proxy took over")
                self._proxy_epoch = epoch
                self._cache_teller.begin()
                log.info("joined worker=%s proxy_epoch=%s", self._settings.worker_id, epoch)
            case wire.Rejected(reason=reason):
                raise WorkerStopped(f"the proxy refused this worker: {reason}", 2)
            case wire.Shutdown():
                raise WorkerStopped("the proxy shut down", 0)
            case wire.ProxyBeat(proxy_epoch=epoch):
                if epoch != self._proxy_epoch:
                    self._say_hello()

    async def _submit(self, request_id: str, frames: list[bytes]) -> None:
        assert self._engine is not None
        if self._slumber.asleep:
            log.warning("request_refused worker=%s request=%s error=asleep", self._settings.worker_id, request_id)
            self._tell_proxy(wire.Outputs(self._epoch), self._engine.failure_frames(request_id))
            return
        try:
            request = self._engine.read_request(frames)
        except RequestUnreadable as error:
            self._bad_frames += 1
            log.warning("request_unreadable worker=%s request=%s error=%s", self._settings.worker_id, request_id, error)
            self._tell_proxy(wire.Outputs(self._epoch), self._engine.failure_frames(request_id))
            return
        self._active.add(request_id)
        self._worked()
        await self._engine.submit(request)

    async def _call_engine(self, method: str, args: list[Any]) -> Any:
        assert self._engine is not None
        return await self._engine.call_utility(method, args)

    async def _utility(self, call: wire.Utility) -> None:
        assert self._engine is not None
        error, result = "", b"\xc0"
        if call.method not in wire.ALLOWED_UTILITIES:
            error = f"{call.method} is not a utility a proxy may call"
        else:
            try:
                answer = await self._engine.call_utility(call.method, msgspec.msgpack.decode(call.args))
                result = msgspec.msgpack.encode(answer)
                if call.method == "reset_prefix_cache" and answer is True:
                    self._cache_teller.engine_was_reset()
            except EngineLost:
                raise
            except Exception as failure:  # noqa: BLE001 - what the engine reports belongs to the caller
                error = f"{type(failure).__name__}: {failure}"
        self._tell_proxy(wire.UtilityReply(call.call_id, error, msgspec.Raw(result)))

    async def _pump_outputs(self) -> None:
        assert self._engine is not None
        while True:
            outputs = await self._engine.next_outputs()
            if (stats := outputs.scheduler_stats) is not None:
                self._num_running, self._num_waiting = stats.num_running_reqs, stats.num_waiting_reqs
            if ended := {out.request_id for out in outputs.outputs if out.finished} & self._active:
                self._active -= ended
                self._worked()
            self._tell_proxy(wire.Outputs(self._epoch), self._engine.outputs_frames(outputs))

    # --- liveness --------------------------------------------------------------------------------

    async def _beat(self) -> None:
        liveness = self._settings.liveness
        while True:
            if not self._proxy_epoch:
                self._say_hello()
            else:
                if self._drain.goal:
                    self._say_hello()  # a proxy that missed it would go on sending
                self._tell_proxy(self._load())
                if time.monotonic() - self._proxy_heard_at_s > liveness.proxy_lost_after_s:
                    await self._forget_proxy(f"the proxy was silent for {liveness.proxy_lost_after_s:g} s")
            await asyncio.sleep(liveness.heartbeat_s)

    async def _forget_proxy(self, why: str) -> None:
        """Nobody waits for these requests any more: free what they hold."""
        assert self._engine is not None
        log.warning("proxy_lost worker=%s reason=%s requests=%d", self._settings.worker_id, why, len(self._active))
        self._proxy_epoch = ""
        self._cache_teller.pause()
        await self._drop_everything()

    async def _drop_everything(self) -> None:
        assert self._engine is not None
        self._proxies_lost += 1
        self._drain.nudge()
        if self._active:
            await self._engine.abort(list(self._active))
            self._active.clear()
        if self._exports:
            await self._ranks.tell_all(DropExports(list(self._exports)))
            self._exports.clear()

    def _say_hello(self) -> None:
        assert self._engine is not None
        ready = [self._ranks.ready[rank] for rank in sorted(self._ranks.ready)]
        self._tell_proxy(
            wire.WorkerHello(
                protocol=wire.PROTOCOL_VERSION,
                worker_id=self._settings.worker_id,
                role=self._drain.role,
                epoch=self._epoch,
                proxies_lost=self._proxies_lost,
                pid=os.getpid(),
                hostname=socket.gethostname(),
                engine=self._engine.facts,
                ranks=[wire.RankAddress(rank.rank, rank.address, rank.epoch) for rank in ready],
                fingerprint=ready[0].fingerprint,
                layout_fields=ready[0].layout_fields,
                drains_to=self._drain.goal,
                drain=self._drain.number,
            )
        )

    def _load(self) -> wire.WorkerLoad:
        assert self._engine is not None
        return worker_load(
            self._settings.worker_id,
            self._epoch,
            self._ranks,
            num_blocks=self._engine.facts.num_blocks,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            bad_frames=self._bad_frames,
            asleep=self._slumber.asleep,
        )


def run_worker(settings: WorkerSettings) -> NoReturn:
    """Runs a host to its end and leaves the process, taking along whatever it started."""
    step_back(settings.niceness)
    start_log()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    exit_code = runner.run(WorkerHost.start_and_run(settings))
    # An engine that was still starting runs in a thread that cannot be cancelled, and in processes that only
    # this one knows; a plain return would wait for the first and leave the second behind.
    # The resource tracker stays: it ends by itself, when it has removed the shared memory of the others.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)
