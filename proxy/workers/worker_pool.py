"""The proxy's side of all workers: who is there, heartbeats both ways, and engine calls that go to everyone."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import zmq

from cluster import messages
from cluster.config import ROLES, LivenessConfig
from cluster.trust import ClusterKey
from proxy.adapters.registry import AdapterRegistry
from proxy.metrics import ProxyMetrics
from proxy.prefixes.prefix_feed import PrefixFeed
from proxy.supervision import beats
from proxy.workers.engine_calls import UTILITY_TIMEOUT_S, EngineCalls, results_of_all
from proxy.workers.roster import Loss, Roster, Worker
from proxy.workers.worker_socket import Frame, WorkerSocket

log = logging.getLogger("twinpool.proxy")


class PoolListener(Protocol):
    """Who hears what workers say about requests (`dispatch.dispatcher.Dispatcher`)."""

    def on_outputs(self, worker: Worker, frames: Sequence[zmq.Frame]) -> None: ...
    def on_prefill_started(self, worker: Worker, transfer_id: str) -> None: ...
    def on_handover_closed(self, worker: Worker, closed: messages.HandoverClosed) -> None: ...
    def on_worker_lost(self, loss: Loss) -> None: ...
    def on_load(self, worker: Worker, load: messages.WorkerLoad) -> None: ...
    def on_pool_changed(self) -> None: ...
    def on_beat(self, now_s: float) -> None: ...
    def needs(self, worker_id: str) -> bool: ...
    def adapters_in_use(self) -> Collection[int]: ...


class WorkerPool:
    """Owns the socket and the roster. Made and used on one event loop."""

    def __init__(
        self,
        address: str,
        roster: Roster,
        liveness: LivenessConfig,
        metrics: ProxyMetrics,
        on_join: Callable[[str, str], None] = lambda _worker_id, _role: None,
        key: ClusterKey | None = None,
    ) -> None:
        """`on_join` hears the id and the role of whoever joins, also of one that took another role. `key` is the
        cluster's, which workers must hold where `address` is tcp.
        """
        self.epoch = uuid.uuid4().hex
        self.roster = roster
        self.prefixes = PrefixFeed(metrics.prefixes)
        self._liveness = liveness
        self._metrics = metrics
        self._on_join = on_join
        self._listener: PoolListener | None = None
        self._changed = asyncio.Event()
        self._calls = EngineCalls(self.send)
        self.adapters = AdapterRegistry(roster, self._calls, self._adapters_in_use, self._pool_changed)
        self._orders: dict[str, messages.Drain] = {}
        """To draining workers, until each has heard of it."""
        self._socket = WorkerSocket(address, self._take, self._bad_frame, key)
        self._beats = asyncio.create_task(self._beat_for_ever(), name="worker-beats")
        self.address = self._socket.address

    def listen(self, listener: PoolListener) -> None:
        """Names who hears about requests; before that such messages are dropped."""
        self._listener = listener

    @property
    def tasks(self) -> tuple["asyncio.Task[None]", ...]:
        """The tasks that must not end while the proxy serves."""
        return (*self._socket.tasks, self._beats)

    @property
    def refused(self) -> dict[str, dict[str, int]]:
        """Connections that were turned away, by who listened (`proxy`, or a worker's id) and reason."""
        loads = {worker.worker_id: worker.load for worker in self.roster.workers.values()}
        counts = {worker_id: dict(load.refused) for worker_id, load in loads.items() if load and load.refused}
        return {**({"proxy": dict(self._socket.refused)} if self._socket.refused else {}), **counts}

    def supported_tasks(self) -> tuple[str, ...]:
        """What every living worker supports, in the order of the first."""
        workers = self.roster.alive()
        if not workers:
            return ("generate",)
        shared = set.intersection(*(set(w.hello.engine.supported_tasks) for w in workers))
        return tuple(task for task in workers[0].hello.engine.supported_tasks if task in shared)

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, worker_id: str, message: messages.ToWorker, extra: Sequence[Frame] = ()) -> bool:
        """Sends to a worker, dead or alive; False if nothing is connected there."""
        worker = self.roster.workers.get(worker_id)
        return worker is not None and self._socket.send(worker.identity, message, extra)

    def give_up(self, worker_id: str, cause: str, *, drained: bool = False, returns: bool = False) -> None:
        """The worker's process has ended; `drained`: because it was told to; `returns`: it will be started again."""
        self.prefixes.forget(worker_id)
        self.roster.expect(worker_id, returns)
        self._lost(self.roster.lose(worker_id, "drained" if drained else "exited", cause))
        self._pool_changed()

    def drain(self, worker_id: str, goal: str, timeout_s: float) -> bool:
        """Tells a worker to drain; `goal` is `messages.LEAVE` or a role. False if it is not alive.

        It is told again until it says that it heard.
        """
        worker = self.roster.order(worker_id, goal)
        if worker is None:
            return False
        log.info("drain_ordered worker=%s goal=%s timeout_s=%g", worker_id, goal, timeout_s)
        order = messages.Drain(goal, timeout_s)
        if worker.ordered:
            self._orders[worker_id] = order
        self.send(worker_id, order)
        self._pool_changed()
        return True

    def remove(self, worker_id: str) -> None:
        """A worker that has left, or never came, does not come back."""
        self._lost(self.roster.lose(worker_id, "left", f"Worker {worker_id} was removed"))
        self.roster.remove(worker_id)
        self.prefixes.forget(worker_id)
        self._orders.pop(worker_id, None)
        self._metrics.forget_worker(worker_id)
        log.info("worker_removed worker=%s", worker_id)
        self._pool_changed()

    def unreachable(self, worker_id: str) -> None:
        """A send to it failed. It may reconnect."""
        self._lost(self.roster.lose(worker_id, "unreachable", f"The connection to worker {worker_id} is gone"))

    async def call_all(self, method: str, *args: Any, timeout_s: float = UTILITY_TIMEOUT_S) -> dict[str, Any]:
        """Calls a method of every living worker's engine; results by worker id. Raises `UtilityError`."""
        answers = await self._calls.each(self.roster.alive(), method, args, timeout_s)
        return results_of_all(answers, method)

    def _adapters_in_use(self) -> Collection[int]:
        return self._listener.adapters_in_use() if self._listener is not None else ()

    # ----------------------------------------------------------------------------------------------- receiving

    def _bad_frame(self, identity: bytes, reason: str) -> None:
        self._metrics.bad_frames.inc()
        worker_id = self.roster.by_identity.get(identity, "unknown")
        log.warning("bad_frame worker=%s connection=%s reason=%s", worker_id, identity.hex(), reason)

    def _take(self, identity: bytes, message: messages.FromWorker, extra: Sequence[zmq.Frame]) -> None:
        now_s = time.monotonic()
        if isinstance(message, messages.WorkerHello):
            self._hello(identity, message, now_s)
            return
        said_id, epoch = getattr(message, "worker_id", None), getattr(message, "epoch", None)
        worker = self.roster.heard(identity, said_id, epoch, now_s)
        if worker is None:
            self._bad_frame(identity, f"{type(message).__name__} from a stranger, or for another worker or life")
            return
        listener = self._listener
        match message:
            case messages.WorkerLoad():
                if self.roster.report(worker, message):
                    log.info("worker_back worker=%s", worker.worker_id)
                    self._pool_changed()
                    self.adapters.catch_up()
                self._metrics.observe_load(worker.worker_id, message)
                if listener is not None:
                    listener.on_load(worker, message)
            case messages.Goodbye():
                cause = f"Worker {worker.worker_id} left: {message.reason}"
                self.prefixes.forget(worker.worker_id)
                drained = worker.drains_to == messages.LEAVE
                self._lost(self.roster.lose(worker.worker_id, "drained" if drained else "left", cause))
            case messages.CacheEvents():
                if self.prefixes.take(worker, message, now_s):
                    self._socket.send(identity, messages.TellCachedBlocks())
            case messages.UtilityReply():
                self._calls.reply(worker, message)
            case messages.Outputs() if listener is not None:
                listener.on_outputs(worker, extra)
            case messages.PrefillStarted() if listener is not None:
                listener.on_prefill_started(worker, message.transfer_id)
            case messages.HandoverClosed() if listener is not None:
                listener.on_handover_closed(worker, message)

    def _hello(self, identity: bytes, hello: messages.WorkerHello, now_s: float) -> None:
        before = self.roster.workers.get(hello.worker_id)
        admission = self.roster.admit(identity, hello, now_s)
        if admission.worker is None:
            log.warning("worker_refused worker=%s reason=%s", hello.worker_id, admission.refused)
            self._socket.send(identity, messages.Rejected(f"worker {hello.worker_id}: {admission.refused}"))
            return
        self._socket.send(identity, messages.Welcome(self.epoch))
        self._lost(admission.lost)
        if before is not None and before is not admission.worker:
            self._metrics.worker_restarts.labels(hello.worker_id).inc()
        if admission.joined:
            log.info(
                "worker_joined worker=%s role=%s epoch=%s fingerprint=%s",
                *(hello.worker_id, hello.role, hello.epoch, hello.fingerprint),
            )
            self.prefixes.forget(hello.worker_id)  # it tells everything anew
            self._introduce(admission.worker)
            self.adapters.catch_up()
            self._on_join(hello.worker_id, hello.role)
        if admission.changed:
            log.info("worker_changed worker=%s role=%s drains_to=%s", hello.worker_id, hello.role, hello.drains_to)
            self._pool_changed()
        self._let_go(admission.worker)

    def _let_go(self, worker: Worker) -> None:
        """Tells a draining worker that nothing more comes, when that is so."""
        waits = worker.alive and worker.hello.drains_to and not worker.ordered
        if waits and (self._listener is None or not self._listener.needs(worker.worker_id)):
            self._socket.send(worker.identity, messages.NothingMore(worker.hello.drain))

    def _follow_drains(self) -> None:
        for worker in self.roster.draining():
            if worker.ordered and worker.worker_id in self._orders:
                self.send(worker.worker_id, self._orders[worker.worker_id])
            self._let_go(worker)
        draining = {worker.worker_id for worker in self.roster.draining() if worker.ordered}
        self._orders = {worker_id: order for worker_id, order in self._orders.items() if worker_id in draining}

    def _introduce(self, newcomer: Worker) -> None:
        """Decode workers get their links to prefill workers ready before a request waits for that."""
        is_prefill = newcomer.role == "prefill"
        prefill = [newcomer] if is_prefill else self.roster.alive("prefill")
        decode = self.roster.alive("decode") if is_prefill else [newcomer]
        meeting = messages.MeetExporters([worker.hello.ranks for worker in prefill])
        for worker in decode if prefill else ():
            self._socket.send(worker.identity, meeting)

    # ------------------------------------------------------------------------------------------------ liveness

    def _lost(self, loss: Loss | None) -> None:
        if loss is None:
            return
        level = logging.INFO if loss.kind == "drained" else logging.WARNING
        log.log(level, "worker_lost worker=%s kind=%s cause=%s", loss.worker_id, loss.kind, loss.cause)
        self._metrics.worker_losses.labels(loss.kind).inc()
        self._calls.lost(loss)
        # First what it carried is given up: a new life under the same id may get requests as soon as it is known.
        if self._listener is not None:
            self._listener.on_worker_lost(loss)
        self._pool_changed()

    def _pool_changed(self) -> None:
        self._metrics.observe_alive(
            {role: len(self.roster.alive(role)) for role in ROLES},
            [worker.role for worker in self.roster.draining()],
            sum(worker.hello.engine.simulated for worker in self.roster.alive()),
        )
        self._changed.set()
        if self._listener is not None:
            self._listener.on_pool_changed()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when workers came or went, or after `timeout_s`."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            self._changed.clear()

    async def _beat_for_ever(self) -> None:
        async for now_s, late_s in beats(self._liveness.heartbeat_s):
            if late_s:
                log.warning("event_loop_late late_s=%.1f", late_s)
                self.roster.forgive(late_s)
            for worker in list(self.roster.workers.values()):
                if worker.hello.epoch not in self.roster.gone_epochs:
                    self._socket.send(worker.identity, messages.ProxyBeat(self.epoch))
            for loss in self.roster.silent(now_s):
                self._lost(loss)
            self._follow_drains()
            self.adapters.beat()
            self._metrics.observe_refused(self.refused)
            if self._listener is not None:
                self._listener.on_beat(now_s)

    def close(self) -> None:
        """Closes the socket. Workers are stopped by whoever started them."""
        self._beats.cancel()
        self.adapters.close()
        self._socket.close()
