"""One simulated worker: to the proxy and to other workers it is what `cluster.host.worker_host` is around an engine."""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from cluster import messages as wire
from cluster.frames import BadFrame, reader
from cluster.host.drain import Carried
from cluster.host.drain_watch import DrainWatch
from cluster.host.leaving import WorkerStopped, first_error
from cluster.host.slumber import Slumber
from cluster.simulated.cache_news import CacheNewsTeller
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
from cluster.simulated.reports import hello, load
from cluster.simulated.settings import SimulatedSettings, SimulatedWorkerName
from cluster.simulated.transfers.desk import TransferDesk
from cluster.simulated.transfers.peer_exchange import PeerExchange
from cluster.simulated.utilities import answer_utility
from cluster.trust import call_with_key

log = logging.getLogger("twinpool.simulated")

_GOODBYE_S = 0.5
_OUTBOX_S = 1.0
_LATE_S = 0.1
"""A machine that is so far behind the modelled one does not try to catch up."""


class SimulatedWorker:
    """One life of one worker. `run` returns the exit code."""

    def __init__(
        self, name: SimulatedWorkerName, settings: SimulatedSettings, context: zmq.asyncio.Context, peers: PeerExchange
    ) -> None:
        self._name, self._worker_id = name, name.worker_id
        self._settings = settings
        self.epoch = uuid.uuid4().hex
        simulation = settings.simulation
        cost = CostModel(simulation, name.worker_id)
        vocabulary = Vocabulary(settings.words, simulation.eos_every)
        self._engine = SimulatedEngine(simulation, settings.max_model_len, cost, vocabulary)
        self._desk = TransferDesk(
            self._engine,
            cost,
            peers,
            self.epoch,
            simulation,
            settings.transfer,
            self._tell_proxy,
            self._on_transfer_settled,
        )
        self._peers = peers
        self._proxy = context.socket(zmq.DEALER)
        self._proxy.setsockopt(zmq.LINGER, 500)  # time for a last Goodbye
        self._proxy.setsockopt(zmq.IDENTITY, f"{name.worker_id}.{self.epoch}".encode())
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._encoder = msgspec.msgpack.Encoder()
        self._read_frame = reader(msgspec.msgpack.Decoder[wire.ToWorker](wire.ToWorker))
        self._work_came = asyncio.Event()
        self._at_work = False
        self._drain = DrainWatch(name.worker_id, name.role, self._carried, self._say_hello, self._drop_everything)
        self._cache_news = CacheNewsTeller(self._engine.cached, self.epoch, self._tell_proxy)
        self._slumber = Slumber(
            name.worker_id, self._carried, self._sleep_or_wake, self._tell_proxy, self._cache_news.nudge
        )
        self._last_work_s = -math.inf
        self._proxy_epoch = ""
        self._proxy_heard_at_s = 0.0
        self._proxies_lost = 0
        self._bad_frames = 0
        self._num_running = 0
        self._num_waiting = 0

    # --- life ------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop` is set, it is drained, the proxy sends it away, or it fails."""
        cause, exit_code = "stopped", 0
        self._peers.join(self.epoch, self._desk.on_peer)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._leave_when_told(stop))
                tasks.create_task(self._work(tasks))
        except* WorkerStopped as group:
            left = first_error(group)
            assert isinstance(left, WorkerStopped)
            cause, exit_code = left.cause, left.exit_code
        except* Exception as group:
            error = first_error(group)
            cause, exit_code = f"{type(error).__name__}: {error}", 1
            log.exception("worker_failed worker=%s", self._worker_id, exc_info=error)
        log.info("worker_leaving worker=%s cause=%s", self._worker_id, cause)
        await self._close(cause)
        return exit_code

    async def _leave_when_told(self, stop: asyncio.Event) -> None:
        await stop.wait()
        raise WorkerStopped("told to stop", 0)

    def drain(self) -> bool:
        """Finishes what it has and leaves; False if that was said before, or it is not up yet."""
        if not self._at_work or self._drain.goal == wire.LEAVE:
            return False
        self._drain.order(wire.LEAVE, self._settings.drain_timeout_s)
        return True

    async def _leave_when_drained(self) -> None:
        cause = await self._drain.run()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._outbox.join(), _OUTBOX_S)  # what it has said comes before its Goodbye
        raise WorkerStopped(cause, 0)

    def _carried(self) -> Carried:
        return Carried(len(self._engine.request_ids), self._desk.num_open, self._last_work_s, bool(self._proxy_epoch))

    def _worked(self) -> None:
        self._last_work_s = time.monotonic()
        self._drain.nudge()

    def _on_transfer_settled(self) -> None:
        self._work_came.set()
        self._worked()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        await asyncio.sleep(self._settings.simulation.start_s / self._settings.simulation.time_scale)
        call_with_key(self._proxy, self._settings.proxy_address, self._settings.key)
        self._proxy.connect(self._settings.proxy_address)
        for part in (self._send_to_proxy, self._read_proxy, self._beat, self._compute):
            tasks.create_task(part())
        tasks.create_task(self._desk.watch_arrivals())
        tasks.create_task(self._desk.renew_leases())
        if self._settings.prefix_events:
            tasks.create_task(self._cache_news.run())
        tasks.create_task(self._leave_when_drained())
        tasks.create_task(self._slumber.run())
        self._at_work = True

    async def _close(self, cause: str) -> None:
        self._peers.leave(self.epoch)
        if self._proxy_heard_at_s:
            goodbye = wire.Goodbye(self._worker_id, self.epoch, cause)
            try:
                await asyncio.wait_for(self._proxy.send_multipart([self._encoder.encode(goodbye)]), _GOODBYE_S)
            except (TimeoutError, zmq.ZMQError) as error:
                log.warning("goodbye_not_sent worker=%s error=%s", self._worker_id, error)
        self._proxy.close()

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
                self._worked()
            frames = outputs_frames(Outputs(outputs=outputs, scheduler_stats=stats, timestamp=now_s))
            self._tell_proxy(wire.Outputs(self.epoch), frames)

    # --- the proxy -------------------------------------------------------------------------------

    def _tell_proxy(self, message: wire.FromWorker, frames: Sequence[bytes] = ()) -> None:
        self._outbox.put_nowait([self._encoder.encode(message), *frames])

    async def _send_to_proxy(self) -> None:
        """The only writer of the proxy socket while the worker is at work."""
        while True:
            await self._proxy.send_multipart(await self._outbox.get(), copy=True)
            self._outbox.task_done()

    async def _read_proxy(self) -> None:
        while True:
            frames = await self._proxy.recv_multipart()
            self._proxy_heard_at_s = time.monotonic()
            try:
                message = self._read_frame(frames[0])
            except BadFrame as error:
                self._bad_frames += 1
                log.warning("bad_proxy_frame worker=%s error=%s", self._worker_id, error)
                continue
            await self._obey(message, frames[1:])

    async def _obey(self, message: wire.ToWorker, frames: list[bytes]) -> None:
        now_s = time.monotonic()
        match message:
            case wire.Submit(engine_request_id=request_id):
                self._submit(request_id, frames, now_s)
            case wire.Abort(engine_request_ids=request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
                self._desk.note_engine_events()
                self._worked()
            case wire.FirstToken(transfer_id=transfer_id, token=token):
                self._desk.on_first_token(transfer_id, token)
            case wire.DropTransfers(transfer_ids=transfer_ids):
                self._desk.drop(transfer_ids)
            case wire.HoldTransfers(transfer_ids=transfer_ids):
                self._desk.hold(transfer_ids)
            case wire.MeetExporters():
                pass  # there is no link to get ready
            case wire.Drain(goal=goal, timeout_s=timeout_s):
                self._drain.order(goal, timeout_s)
            case wire.NothingMore(drain=number):
                self._drain.nothing_more(number)
            case wire.TellCachedBlocks():
                self._tell_cached_blocks()
            case wire.Utility():
                if not self._slumber.takes(message):
                    self._utility(message)
            case wire.Welcome(proxy_epoch=epoch):
                if self._proxy_epoch and epoch != self._proxy_epoch:
                    await self._forget_proxy("another proxy took over")
                self._proxy_epoch = epoch
                self._tell_cached_blocks()
                log.info("joined worker=%s proxy_epoch=%s", self._worker_id, epoch)
            case wire.Rejected(reason=reason):
                raise WorkerStopped(f"the proxy refused this worker: {reason}", 2)
            case wire.Shutdown():
                raise WorkerStopped("the proxy shut down", 0)
            case wire.ProxyBeat(proxy_epoch=epoch):
                if epoch != self._proxy_epoch:
                    self._say_hello()

    def _submit(self, request_id: str, frames: list[bytes], now_s: float) -> None:
        try:
            if self._slumber.asleep:
                raise ValueError("the engine is asleep")
            self._engine.add(read_request(frames), now_s)
        except (RequestUnreadable, ValueError) as error:
            self._bad_frames += isinstance(error, RequestUnreadable)
            log.warning("request_refused worker=%s request=%s error=%s", self._worker_id, request_id, error)
            failed = Output(request_id, [], finish_reason=Finish.ERROR)
            self._tell_proxy(wire.Outputs(self.epoch), outputs_frames(Outputs(outputs=[failed], timestamp=now_s)))
            return
        self._desk.note_engine_events()
        self._worked()
        self._work_came.set()

    def _tell_cached_blocks(self) -> None:
        if self._settings.prefix_events:
            self._cache_news.begin()

    def _utility(self, call: wire.Utility) -> None:
        try:
            args = msgspec.msgpack.decode(call.args, type=list[Any])
        except msgspec.DecodeError as failure:
            error, result = f"the arguments cannot be read: {failure}", None
        else:
            error, result = answer_utility(call.method, args, self._engine)
        self._cache_news.nudge()
        self._tell_proxy(wire.UtilityReply(call.call_id, error, msgspec.Raw(msgspec.msgpack.encode(result))))

    async def _sleep_or_wake(self, method: str, _args: list[Any]) -> bool:
        """As vLLM's engine core does it: asleep its cache holds nothing, and waking takes its time."""
        if method == "sleep" and not self._engine.reset_prefix_cache():
            raise RuntimeError("blocks of the KV cache are in use")
        if method == "wake_up":
            simulation = self._settings.simulation
            await asyncio.sleep(0 if simulation.speed == "instant" else simulation.wake_s / simulation.time_scale)
            self._work_came.set()
        return True

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
        num_requests = len(self._engine.request_ids)
        log.warning("proxy_lost worker=%s reason=%s requests=%d", self._worker_id, why, num_requests)
        self._proxy_epoch = ""
        self._cache_news.pause()
        await self._drop_everything()

    async def _drop_everything(self) -> None:
        self._proxies_lost += 1
        self._drain.nudge()
        for request_id in self._engine.request_ids:
            self._engine.abort(request_id)
        self._desk.note_engine_events()
        self._desk.drop_all()

    def _say_hello(self) -> None:
        ranks = [wire.RankAddress(0, self._peers.address, self.epoch)]
        self._tell_proxy(hello(self._name, self._settings, self.epoch, self._proxies_lost, ranks, self._drain))

    def _load(self) -> wire.WorkerLoad:
        return load(
            self._name.worker_id,
            self.epoch,
            (self._num_running, self._num_waiting),
            self._engine.block_count(),
            self._desk.exports,
            self._desk.imports,
            self._bad_frames,
            self._engine.tokens_computed,
            asleep=self._slumber.asleep,
        )
