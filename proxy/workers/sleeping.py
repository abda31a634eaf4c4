"""Puts all workers of a cluster to sleep together, and wakes them.

Between the two, nothing may change: a cluster of which one worker is lost cannot be woken, and one that was started
meanwhile would want memory that belongs to somebody else now. Then, and when a worker does not fall asleep or wake up,
the cluster ends, with all its processes; whoever needs it starts it anew.
"""

import asyncio
import logging
import time
from typing import Any, Literal, Protocol

from cluster.config import ROLES
from cluster.orders import SleepOrder, Slept, WakeOrder
from proxy.scheduling.place import ASLEEP, Reject
from proxy.workers.administration import Administration, OrderRefused
from proxy.workers.engine_calls import UtilityError
from proxy.workers.rolling_restart import LOOK_AGAIN_S
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")

State = Literal["awake", "falling asleep", "asleep", "waking"]

CALL_TIMEOUT_S = 60.0
"""For what a worker does itself: wait for its last transfers, and move its weights."""


class SleepFailed(Exception):
    """The cluster cannot go on; the text says why."""


class Door(Protocol):
    """Where requests come in (`proxy.dispatch.dispatcher.Dispatcher`)."""

    @property
    def num_requests(self) -> int: ...
    def hold_off(self, answer: Reject | None) -> None: ...


class Sleeping:
    """Used on the proxy's event loop. `run` must not end while the proxy serves."""

    def __init__(self, pool: WorkerPool, administration: Administration, door: Door, drain_timeout_s: float) -> None:
        self._pool = pool
        self._administration = administration
        self._door = door
        self._drain_timeout_s = drain_timeout_s
        self.state: State = "awake"
        self._sleepers: dict[str, str] = {}
        """Worker ids and their epochs."""
        self._eventful = asyncio.Event()
        self._failure = ""
        administration.is_awake = lambda: self.state == "awake"

    async def run(self) -> None:
        """Until it is cancelled. Raises `SleepFailed`."""
        while True:
            await self._eventful.wait()
            if cause := self._failure or self._change():
                raise SleepFailed(cause)
            await self._pool.wait_for_change(LOOK_AGAIN_S)

    async def sleep(self, order: SleepOrder) -> Slept:
        """Returns when all sleep. Raises `OrderRefused`; then all are awake, or the cluster is about to end."""
        if self.state == "asleep":
            return Slept(self.state, 0.0)
        if obstacle := self._obstacle():
            raise OrderRefused(409, obstacle)
        began_s = time.monotonic()
        timeout_s = order.timeout_s or self._drain_timeout_s
        self._door.hold_off(ASLEEP)
        self._enter("falling asleep")
        try:
            async with asyncio.timeout(timeout_s):
                while self._door.num_requests:
                    await self._pool.wait_for_change(LOOK_AGAIN_S)
        except TimeoutError as error:
            left = self._door.num_requests
            self._open()
            raise OrderRefused(409, f"{left} requests were not finished within {timeout_s:g} s") from error
        except BaseException:
            self._open()
            raise
        self._sleepers = {worker.worker_id: worker.hello.epoch for worker in self._pool.roster.alive()}
        self._eventful.set()
        await self._call("sleep", CALL_TIMEOUT_S, 1, "abort")
        self._enter("asleep")
        return Slept(self.state, time.monotonic() - began_s)

    async def wake(self, order: WakeOrder) -> Slept:
        """Returns when all are awake. Raises `OrderRefused`; then the cluster is about to end, or was not asleep."""
        if self.state == "awake":
            return Slept(self.state, 0.0)
        if self.state != "asleep":
            raise OrderRefused(409, f"the cluster is {self.state}; try again when it is asleep")
        began_s = time.monotonic()
        self._enter("waking")
        await self._call("wake_up", order.timeout_s or CALL_TIMEOUT_S, None)
        self._open()
        return Slept(self.state, time.monotonic() - began_s)

    def _obstacle(self) -> str:
        """Why it cannot fall asleep now; empty if it can."""
        if self.state != "awake":
            return f"the cluster is {self.state} already"
        roster = self._pool.roster
        awake_for_good = [worker.worker_id for worker in roster.alive() if not worker.hello.engine.can_sleep]
        if awake_for_good:
            return (
                f"{', '.join(awake_for_good)}: the engine was started without sleep mode; where vLLM has it, set "
                "engine.enable_sleep_mode=true"
            )
        if self._administration.restarts or self._administration.leaving or roster.draining():
            return "workers are just being restarted, removed or drained; try again when that has ended"
        coming = [worker.worker_id for role in ROLES for worker in roster.coming_back(role)]
        coming += [worker_id for worker_id in roster.expected if worker_id not in roster.workers]
        return f"{', '.join(coming)} is not up; try again when it is" if coming else ""

    def _change(self) -> str:
        """What has happened that must not while the workers sleep; empty: nothing."""
        roster = self._pool.roster
        alive = {worker.worker_id: worker.hello.epoch for worker in roster.alive()}
        lost = [worker_id for worker_id, epoch in self._sleepers.items() if alive.get(worker_id) != epoch]
        if lost:
            causes = "; ".join(roster.causes.get(worker_id, "it is not known why") for worker_id in lost)
            return f"{', '.join(lost)} was lost while the cluster was {self.state}: {causes}"
        come = alive.keys() - self._sleepers.keys()
        return f"{', '.join(sorted(come))} came while the cluster was {self.state}" if come else ""

    async def _call(self, method: str, timeout_s: float, *args: Any) -> None:
        """Of every worker. If it fails anywhere nothing can be relied on."""
        try:
            await self._pool.call_all(method, *args, timeout_s=timeout_s)
        except asyncio.CancelledError:
            self._fail(f"the call {method} of the workers was interrupted")
            raise
        except UtilityError as error:
            self._fail(f"the workers could not carry out {method}: {error}")
            raise OrderRefused(500, f"{self._failure}; the cluster ends") from error

    def _fail(self, cause: str) -> None:
        log.error("sleep_failed state=%s cause=%s", self.state, cause)
        self._failure = cause
        self._eventful.set()

    def _open(self) -> None:
        self._eventful.clear()
        self._sleepers = {}
        self._enter("awake")
        self._door.hold_off(None)

    def _enter(self, state: State) -> None:
        log.info("cluster_%s", state.replace(" ", "_"))
        self.state = state
