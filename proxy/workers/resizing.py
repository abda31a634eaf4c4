"""Gives a pool another number of workers while it serves: new ones are started, or some finish what they have and leave
for good."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.config import Role
from cluster.messages import LEAVE
from cluster.orders import Accepted
from cluster.status import LaunchNote
from proxy.supervision import log_failure
from proxy.workers.rolling_restart import LOOK_AGAIN_S, RollingTimes, WorkerControl
from proxy.workers.roster import ENDS, Roster, Worker, role_named_in
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")


@dataclass(frozen=True, slots=True)
class Members:
    """The workers of one pool, by the role that they serve in or are about to; those that leave are not among them."""

    serving: tuple[Worker, ...] = ()
    changing: tuple[str, ...] = ()
    """They drain from the other role to this one."""
    coming: tuple[str, ...] = ()
    """Their processes are started, for the first time or again."""
    away: tuple[str, ...] = ()
    """They died or left, and nobody starts them again by himself."""

    @property
    def count(self) -> int:
        """Workers that the pool has or will have if nothing is done."""
        return len(self.serving) + len(self.changing) + len(self.coming)

    def least_needed(self, count: int, cached_blocks: Mapping[str, int]) -> list[str]:
        """So many workers, those first whose leaving costs least.

        A worker that is not up costs nothing; then those with fewest requests, fewest KV blocks in use, fewest blocks
        of prompts in their prefix cache; of equals the newest. `cached_blocks`: by worker id.
        """

        def cost(worker: Worker) -> tuple[int, int, int, int]:
            load = worker.load
            requests = load.num_running + load.num_waiting + load.exports_open + load.imports_open if load else 0
            blocks = load.blocks_used + load.blocks_leased if load else 0
            return requests, blocks, cached_blocks.get(worker.worker_id, 0), -worker.index

        ready = [worker.worker_id for worker in sorted(self.serving, key=cost)]
        return [*reversed(self.coming), *reversed(self.changing), *ready][:count]


def members(roster: Roster, notes: Mapping[str, LaunchNote], role: Role, leaving: frozenset[str]) -> Members:
    """Who is in a pool now. `leaving`: workers that are being removed."""
    serving, changing, coming, away = [], [], [], []
    ids = [*roster.workers, *(name for name in roster.expected if name not in roster.workers)]
    for worker_id in ids:
        worker = roster.workers.get(worker_id)
        note = notes.get(worker_id)
        if worker_id in leaving or _pool_of(worker_id, worker) != role:
            continue
        if worker is not None and worker.alive:
            if worker.takes_requests:
                serving.append(worker)
            elif worker.drains_to != LEAVE:
                changing.append(worker_id)
        elif note.starting if note is not None else worker is None and worker_id not in roster.causes:
            coming.append(worker_id)
        else:
            away.append(worker_id)
    return Members(tuple(serving), tuple(changing), tuple(coming), tuple(away))


def _pool_of(worker_id: str, worker: Worker | None) -> str:
    if worker is None:
        return role_named_in(worker_id)
    return worker.drains_to if worker.alive and worker.drains_to not in ("", LEAVE) else worker.role


@dataclass(slots=True)
class Resizing:
    """Used on the proxy's event loop."""

    pool: WorkerPool
    control: WorkerControl
    times: RollingTimes
    leaving: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """Workers that are being removed, and who sees them off."""

    def members(self, role: Role) -> Members:
        """Who is in a pool now."""
        return members(self.pool.roster, self.control.notes(), role, frozenset(self.leaving))

    def resize(self, role: Role, count: int, timeout_s: float) -> Accepted:
        """Starts or removes workers, so that the pool comes to have `count`; raises `cluster.launch.seats.NothingFree`.

        Those that are away are started again before new ones are; those that are still away then are removed too.
        """
        now = self.members(role)
        missing = max(0, count - now.count)
        again = [worker_id for worker_id in now.away if self.control.knows(worker_id)][:missing]
        new = self.control.hire(role, missing - len(again)) if missing > len(again) else []
        for worker_id in again:
            self.control.start_now(worker_id)
        for worker_id in new:
            self.pool.roster.await_worker(worker_id)
        gone = [worker_id for worker_id in now.away if worker_id not in again]
        surplus = now.least_needed(now.count - count, self._cached_blocks()) if count < now.count else []
        for worker_id in (*gone, *surplus):
            self._see_off(worker_id, timeout_s)
        log.info("resized pool=%s count=%d starting=%s leaving=%s", role, count, [*again, *new], [*gone, *surplus])
        if missing:
            text = f"starting {', '.join([*again, *new])}"
            return Accepted(text, [*again, *new], self.times.start_timeout_s + self.times.stop_s)
        if surplus:
            verb, them = ("finishes", "it has and leaves") if len(surplus) == 1 else ("finish", "they have and leave")
            return Accepted(f"{', '.join(surplus)} {verb} what {them}", surplus, timeout_s + self.times.stop_s)
        return Accepted(f"the {role} pool has {count} workers already", [], 0.0)

    def least_busy(self, role: Role, count: int) -> list[str]:
        """Of those that serve in a pool, so many whose leaving costs least."""
        serving = Members(serving=self.members(role).serving)
        return serving.least_needed(count, self._cached_blocks())

    def _cached_blocks(self) -> dict[str, int]:
        index = self.pool.prefixes.index
        return {worker_id: index.num_blocks_of(worker_id) for worker_id in self.pool.roster.workers}

    def _see_off(self, worker_id: str, timeout_s: float) -> None:
        """It finishes what it has and is forgotten; a worker that is not up is ended at once."""
        worker = self.pool.roster.workers.get(worker_id)
        drains = worker is not None and worker.alive
        self.control.remove(worker_id, at_once=not drains)
        if drains:
            self.pool.drain(worker_id, LEAVE, timeout_s)
        task = asyncio.create_task(self._forget_when_left(worker_id, timeout_s), name=f"remove {worker_id}")
        self.leaving[worker_id] = task
        task.add_done_callback(log_failure)

    async def _forget_when_left(self, worker_id: str, timeout_s: float) -> None:
        try:
            if not await self._left(worker_id, timeout_s + self.times.stop_s):
                log.warning("worker_ended worker=%s reason=did_not_leave_within_%g_s", worker_id, timeout_s)
                self.control.remove(worker_id, at_once=True)
                await self._left(worker_id, self.times.stop_s)
            self.pool.remove(worker_id)
        finally:
            self.leaving.pop(worker_id, None)

    async def _left(self, worker_id: str, within_s: float) -> bool:
        deadline_s = time.monotonic() + within_s
        while (worker := self.pool.roster.workers.get(worker_id)) is not None:
            if not worker.alive and worker.lost_by in ENDS:
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            await self.pool.wait_for_change(min(left_s, LOOK_AGAIN_S))
        return True

    def close(self) -> None:
        """Waits for nobody any more."""
        for task in self.leaving.values():
            task.cancel()
