"""One simulated worker: to the proxy and to other workers it is what `cluster.host.worker_host` is around an engine."""

import asyncio
import logging
import time
from typing import Any

import msgspec
import zmq.asyncio

from cluster import messages as wire
from cluster.host.leaving import until_it_leaves
from cluster.host.proxy_line import Introduction, Order, ProxyLine
from cluster.host.slumber import Slumber
from cluster.simulated.cache_news import CacheNewsRunner
from cluster.simulated.engine.cost import CostModel
from cluster.simulated.engine.paged_engine import SimulatedEngine
from cluster.simulated.engine.vllm_frames import (
    Finish,
    Output,
    Outputs,
    RequestUnreadable,
    outputs_frames,
    read_request,
)
from cluster.simulated.engine.vocabulary import Vocabulary
from cluster.simulated.reports import introduction, load
from cluster.simulated.settings import SimulatedSettings, SimulatedWorkerName
from cluster.simulated.transfers.desk import TransferDesk
from cluster.simulated.transfers.peer_exchange import PeerExchange
from cluster.simulated.utilities import answer_utility

log = logging.getLogger("twinpool.simulated")

_LATE_S = 0.1
"""A machine that is so far behind the modelled one does not try to catch up."""


class SimulatedWorker:
    """One life of one worker. `run` returns the exit code."""

    def __init__(
        self, name: SimulatedWorkerName, settings: SimulatedSettings, context: zmq.asyncio.Context, peers: PeerExchange
    ) -> None:
        self._worker_id = name.worker_id
        self._settings = settings
        simulation = settings.simulation
        cost = CostModel(simulation, name.worker_id)
        vocabulary = Vocabulary(settings.words, simulation.eos_every)
        self._engine = SimulatedEngine(simulation, settings.max_model_len, cost, vocabulary)
        self._line = ProxyLine(context, settings, name.worker_id, name.role, self)
        self._desk = TransferDesk(
            self._engine,
            cost,
            peers,
            self._line.epoch,
            simulation,
            settings.transfer,
            self._line.tell,
            self._on_transfer_settled,
        )
        self._peers = peers
        self._cache_news = CacheNewsRunner(self._line.cache)
        if settings.prefix_events:
            self._line.cache.watch(self._engine.cached)
        self._work_came = asyncio.Event()
        self._slumber = Slumber(
            name.worker_id, self._line.carried, self._sleep_or_wake, self._line.tell, self._cache_news.nudge
        )
        self._num_running = 0
        self._num_waiting = 0

    # --- life ------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop` is set, it is drained, the proxy sends it away, or it fails."""
        self._peers.join(self._line.epoch, self._desk.on_peer)
        left = await until_it_leaves(self._worker_id, stop, self._work)
        self._peers.leave(self._line.epoch)
        await self._line.close(left.cause)
        return left.exit_code

    def drain(self) -> bool:
        """Finishes what it has and leaves; False if that was said before, or it is not up yet."""
        return self._line.leave_when_done()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        await asyncio.sleep(self._settings.simulation.start_s / self._settings.simulation.time_scale)
        self._line.begin(tasks)
        tasks.create_task(self._compute())
        tasks.create_task(self._desk.watch_arrivals())
        tasks.create_task(self._desk.renew_leases())
        if self._settings.prefix_events:
            tasks.create_task(self._cache_news.run())
        tasks.create_task(self._slumber.run())

    # --- the engine ------------------------------------------------------------------------------

    async def _compute(self) -> None:
        """Step after step, each as long as the cost model says."""
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            step = None if self._slumber.asleep else self._engine.plan(now_s)
            self._desk.note_engine_events()
            if step is None:
                self._work_came.clear()
                await self._work_came.wait()
                due_s = time.monotonic()
                continue
            # Timers are late by up to a millisecond; the next step makes up for it.
            due_s = max(due_s, now_s - _LATE_S) + step.seconds
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            outputs = self._engine.finish(step, now_s)
            self._cache_news.nudge()
            self._desk.note_engine_events()
            stats = self._engine.take_stats()
            self._num_running, self._num_waiting = stats.num_running_reqs, stats.num_waiting_reqs
            if any(output.finish_reason is not None for output in outputs):
                self._line.worked()
            frames = outputs_frames(Outputs(outputs=outputs, scheduler_stats=stats, timestamp=now_s))
            self._line.tell(wire.Outputs(self._line.epoch), frames)

    def _on_transfer_settled(self) -> None:
        self._work_came.set()
        self._line.worked()

    async def obey(self, order: Order, frames: list[bytes]) -> None:
        """Does what the proxy wants done."""
        now_s = time.monotonic()
        match order:
            case wire.Submit(engine_request_id=request_id):
                self._submit(request_id, frames, now_s)
            case wire.Abort(engine_request_ids=request_ids):
                self._abort(request_ids)
                self._line.worked()
            case wire.FirstToken(transfer_id=transfer_id, token=token):
                self._desk.on_first_token(transfer_id, token)
            case wire.MeetExporters():
                pass  # there is no link to get ready
            case wire.DropTransfers(transfer_ids=transfer_ids):
                self._desk.drop(transfer_ids)
            case wire.HoldTransfers(transfer_ids=transfer_ids):
                self._desk.hold(transfer_ids)
            case wire.Utility():
                if not self._slumber.takes(order):
                    self._utility(order)

    def _submit(self, request_id: str, frames: list[bytes], now_s: float) -> None:
        try:
            if self._slumber.asleep:
                raise ValueError("the engine is asleep")
            self._engine.add(read_request(frames), now_s)
        except (RequestUnreadable, ValueError) as error:
            self._line.bad_frames += isinstance(error, RequestUnreadable)
            log.warning("request_refused worker=%s request=%s error=%s", self._worker_id, request_id, error)
            failed = Output(request_id, [], finish_reason=Finish.ERROR)
            self._line.tell(wire.Outputs(self._line.epoch), outputs_frames(Outputs(outputs=[failed], timestamp=now_s)))
            return
        self._desk.note_engine_events()
        self._line.worked()
        self._work_came.set()

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
        self._desk.note_engine_events()

    def _utility(self, call: wire.Utility) -> None:
        try:
            args = msgspec.msgpack.decode(call.args, type=list[Any])
        except msgspec.DecodeError as failure:
            error, result = f"the arguments cannot be read: {failure}", None
        else:
            error, result = answer_utility(call.method, args, self._engine)
        self._cache_news.nudge()
        self._line.tell(wire.UtilityReply(call.call_id, error, msgspec.Raw(msgspec.msgpack.encode(result))))

    async def _sleep_or_wake(self, method: str, _args: list[Any]) -> bool:
        """As vLLM's engine core does it: asleep its cache holds nothing, and waking takes its time."""
        if method == "sleep" and not self._engine.reset_prefix_cache():
            raise RuntimeError("blocks of the KV cache are in use")
        if method == "wake_up":
            simulation = self._settings.simulation
            await asyncio.sleep(0 if simulation.speed == "instant" else simulation.wake_s / simulation.time_scale)
            self._work_came.set()
        return True

    async def drop_everything(self) -> None:
        """Frees what requests and transfers hold for which nobody waits."""
        self._abort(self._engine.request_ids)
        self._desk.drop_all()

    # --- what it says of itself ------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._engine.request_ids)

    @property
    def transfers_open(self) -> int:
        return self._desk.num_open

    def introduction(self) -> Introduction:
        return introduction(self._settings, [wire.RankAddress(0, self._peers.address, self._line.epoch)])

    def load(self) -> wire.WorkerLoad:
        return load(
            self._worker_id,
            self._line.epoch,
            (self._num_running, self._num_waiting),
            self._engine.block_count(),
            self._desk.exports,
            self._desk.imports,
            self._line.bad_frames + self._peers.bad_frames,
            self._engine.tokens_computed,
            asleep=self._slumber.asleep,
        )
