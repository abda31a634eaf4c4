"""The process around one engine: takes requests from the proxy, gives back outputs, reports load, notices death.

A host is either whole or gone: when its engine, its ranks' channel or any of its tasks fails, it says
`Goodbye` with the cause and exits, and the proxy acts on that. What it says to the proxy is in `host/proxy_line.py`.

SIGTERM drains it, as `Drain` of a proxy does: it finishes what it has and leaves (`host/drain.py` says when). SIGINT,
and a second SIGTERM, end it at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from typing import Any, NoReturn

import msgspec
import psutil
import uvloop
import zmq.asyncio

from cluster import messages as wire
from cluster.host.leaving import WorkerStopped, until_it_leaves
from cluster.host.load_report import transfers_open, worker_load
from cluster.host.proxy_line import Introduction, Order, ProxyLine
from cluster.host.rank_channel import RankChannel
from cluster.host.slumber import Slumber
from cluster.host.stepping_back import step_back
from cluster.host.vllm_engine import Engine, EngineLost, RequestUnreadable, cache_event_config, engine_config
from cluster.launch.logs import start_log
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.relay import CacheRelay
from cluster.trust import write_key
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

ENGINE_STOP_S = 1.5
"""An engine has nothing to save; its interpreters take five seconds each to unload what they imported."""


class WorkerHost:
    """One worker. `run` returns the exit code."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._context = zmq.asyncio.Context()
        self._ranks = RankChannel(self._context, settings.report_address, self._on_rank_event, settings.key)
        self._line = ProxyLine(self._context, settings, settings.worker_id, settings.role, self)
        self._stop = asyncio.Event()
        self._started: Engine | None = None
        self._slumber = Slumber(
            settings.worker_id,
            self._line.carried,
            self._call_engine,
            self._line.tell,
            self._line.cache.engine_was_reset,
        )
        self._num_ranks = 0
        self._ranks_complete = asyncio.Event()
        self._active: set[str] = set()
        """Requests that the engine has."""
        self._exports: deque[str] = deque(maxlen=MAX_REMEMBERED_EXPORTS)
        self._num_running = 0
        self._num_waiting = 0

    @classmethod
    async def start_and_run(cls, settings: WorkerSettings) -> int:
        """Sockets belong to the running loop, so the host is made inside it."""
        return await cls(settings).run()

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        left = await until_it_leaves(self._settings.worker_id, self._stop, self._work)
        await self._line.close(left.cause)
        if self._started is not None:
            await self._started.stop(min(ENGINE_STOP_S, self._settings.stop_timeout_s))
        self._ranks.close()
        self._context.term()
        return left.exit_code

    def _on_sigterm(self) -> None:
        if not self._line.leave_when_done():
            self._stop.set()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._ranks.run())
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start_engine()
        except TimeoutError as error:
            raise WorkerStopped(
                f"the engine was not up within start_timeout_s={self._settings.start_timeout_s:g}; raise it, or see "
                "this worker's log for what takes so long",
                1,
            ) from error
        self._tasks = tasks
        self._line.begin(tasks)
        tasks.create_task(self._pump_outputs())
        tasks.create_task(self._slumber.run())
        if (facts := self._engine.facts).prefix_events:
            cached = CachedBlocks(facts.block_size, facts.num_blocks)
            addresses = (self._settings.event_address, self._settings.replay_address)
            tasks.create_task(CacheRelay(self._context, *addresses, cached, self._line.cache).run())

    async def _start_engine(self) -> None:
        settings = self._settings
        events = cache_event_config(settings.event_address, settings.replay_address) if settings.prefix_events else None
        config = await asyncio.to_thread(
            engine_config, settings.model, settings.engine, self._connector_settings(), events, settings.across_nodes
        )
        self._started = await Engine.start(config)
        self._num_ranks = config.parallel_config.world_size
        self._check_ranks_complete()
        await self._ranks_complete.wait()

    def _connector_settings(self) -> dict[str, Any]:
        key = self._settings.key
        return {
            "worker_id": self._settings.worker_id,
            "key_file": str(write_key(self._settings.key_file, key)) if key is not None else "",
            "bind": self._settings.rank_bind,
            "report_to": self._ranks.address,
            "chunk_order": self._settings.chunk_order,
            "itl_s": self._settings.itl_s,
            "ray_address": self._settings.ray_address,
            "placement_group": self._settings.placement_group,
            **self._settings.transfer.model_dump(exclude={"bind_host"}),
        }

    # --- ranks -----------------------------------------------------------------------------------

    def _check_ranks_complete(self) -> None:
        if self._num_ranks and len(self._ranks.ready) >= self._num_ranks:
            self._ranks_complete.set()

    def _on_rank_event(self, message: FromRank) -> None:
        match message:
            case ExportStarted():
                self._exports.append(message.transfer_id)
                self._line.tell(wire.PrefillStarted(message.transfer_id))
            case ImportClosed():
                self._line.tell(wire.HandoverClosed(**msgspec.structs.asdict(message)))
            case _:
                self._check_ranks_complete()
                self._line.nudge()

    # --- the engine ------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        """The proxy is called only when it is up."""
        assert self._started is not None
        return self._started

    async def obey(self, order: Order, frames: list[bytes]) -> None:
        """Does what the proxy wants done. Nothing else is heard of it meanwhile."""
        match order:
            case wire.Submit(engine_request_id=request_id):
                await self._submit(request_id, frames)
            case wire.Abort(engine_request_ids=request_ids):
                self._active.difference_update(request_ids)
                self._line.worked()
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
            case wire.Utility():
                # It may take long: an adapter is read from a disk.
                if not self._slumber.takes(order):
                    self._tasks.create_task(self._utility(order))

    async def _submit(self, request_id: str, frames: list[bytes]) -> None:
        if self._slumber.asleep:
            log.warning("request_refused worker=%s request=%s error=asleep", self._settings.worker_id, request_id)
            self._line.tell(wire.Outputs(self._line.epoch), self._engine.failure_frames(request_id))
            return
        try:
            request = self._engine.read_request(frames)
        except RequestUnreadable as error:
            self._line.bad_frames += 1
            log.warning("request_unreadable worker=%s request=%s error=%s", self._settings.worker_id, request_id, error)
            self._line.tell(wire.Outputs(self._line.epoch), self._engine.failure_frames(request_id))
            return
        self._active.add(request_id)
        self._line.worked()
        await self._engine.submit(request)

    async def _call_engine(self, method: str, args: list[Any]) -> Any:
        return await self._engine.call_utility(method, args)

    async def _utility(self, call: wire.Utility) -> None:
        error, result = "", b"\xc0"
        if call.method not in wire.ALLOWED_UTILITIES:
            error = f"{call.method} is not a utility a proxy may call"
        else:
            try:
                answer = await self._engine.call_utility(call.method, msgspec.msgpack.decode(call.args))
                result = msgspec.msgpack.encode(answer)
                if call.method == "reset_prefix_cache" and answer is True:
                    self._line.cache.engine_was_reset()
            except EngineLost:
                raise
            except Exception as failure:  # noqa: BLE001 - what the engine reports belongs to the caller
                error = f"{type(failure).__name__}: {failure}"
        self._line.tell(wire.UtilityReply(call.call_id, error, msgspec.Raw(result)))

    async def _pump_outputs(self) -> None:
        while True:
            outputs = await self._engine.next_outputs()
            if (stats := outputs.scheduler_stats) is not None:
                self._num_running, self._num_waiting = stats.num_running_reqs, stats.num_waiting_reqs
            if ended := {out.request_id for out in outputs.outputs if out.finished} & self._active:
                self._active -= ended
                self._line.worked()
            self._line.tell(wire.Outputs(self._line.epoch), self._engine.outputs_frames(outputs))

    async def drop_everything(self) -> None:
        """Frees what requests and transfers hold for which nobody waits."""
        if self._active:
            await self._engine.abort(list(self._active))
            self._active.clear()
        if self._exports:
            await self._ranks.tell_all(DropExports(list(self._exports)))
            self._exports.clear()

    # --- what it says of itself ------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._active)

    @property
    def transfers_open(self) -> int:
        return transfers_open(self._ranks)

    def introduction(self) -> Introduction:
        ready = [self._ranks.ready[rank] for rank in sorted(self._ranks.ready)]
        return Introduction(
            engine=self._engine.facts,
            ranks=[wire.RankAddress(rank.rank, rank.address, rank.epoch) for rank in ready],
            fingerprint=ready[0].fingerprint,
            layout_fields=ready[0].layout_fields,
        )

    def load(self) -> wire.WorkerLoad:
        return worker_load(
            self._settings.worker_id,
            self._line.epoch,
            self._ranks,
            num_blocks=self._engine.facts.num_blocks,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            bad_frames=self._line.bad_frames,
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
