"""Starts workers again one after another: each finishes what it has, leaves, is started and joins before the next."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.config import Role
from cluster.messages import LEAVE
from cluster.orders import RollingStatus
from cluster.status import LaunchNote
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")

LOOK_AGAIN_S = 0.5


class WorkerControl(Protocol):
    """Who starts the processes of workers (`cluster.fleet.fleet.Fleet`)."""

    def knows(self, worker_id: str) -> bool: ...
    def keep_down(self, worker_id: str) -> None: ...
    def start_when_gone(self, worker_id: str) -> None: ...
    def start_now(self, worker_id: str) -> None: ...
    @property
    def devices(self) -> int | None: ...
    def hire(self, role: Role, count: int) -> list[str]: ...
    def remove(self, worker_id: str, *, at_once: bool = False) -> None: ...
    def joined(self, worker_id: str, role: str) -> None: ...
    def notes(self) -> Mapping[str, LaunchNote]: ...


@dataclass(frozen=True, slots=True)
class RollingTimes:
    """Seconds."""

    drain_timeout_s: float
    start_timeout_s: float
    stop_s: float
    """For a process to end when everything is done."""

    @property
    def of_one_s(self) -> float:
        """The longest a worker may take from its order until it is back."""
        return self.drain_timeout_s + self.stop_s + self.start_timeout_s


class _Failed(Exception):
    """The text says why the rest is not restarted."""


class RollingRestart:
    """One of them. `status` says how far it is."""

    def __init__(
        self, pool: WorkerPool, control: WorkerControl, worker_ids: list[str], times: RollingTimes, force: bool
    ) -> None:
        self.status = RollingStatus(worker_ids, [], worker_ids[0])
        self._pool = pool
        self._control = control
        self._times = times
        self._force = force

    async def run(self) -> None:
        """Ends with the last worker back, or with the first that does not come back."""
        done: list[str] = []
        workers, failed = self.status.workers, "it was interrupted"
        try:
            for worker_id in workers:
                self.status = RollingStatus(workers, list(done), worker_id)
                log.info("restarting worker=%s", worker_id)
                await self._restart(worker_id)
                done.append(worker_id)
            failed = ""
        except _Failed as error:
            failed = str(error)
            log.error("rolling_restart_stopped done=%s reason=%s", done, failed)
        finally:
            self.status = RollingStatus(workers, done, "", failed)

    async def _restart(self, worker_id: str) -> None:
        roster = self._pool.roster
        note_before = self._control.notes().get(worker_id)
        worker = roster.workers.get(worker_id)
        old_epoch = worker.hello.epoch if worker is not None else ""
        if worker is not None and worker.alive:
            if worker.role == "decode" and not self._force:
                await self._until(
                    lambda: any(w is not worker for w in roster.taking_requests("decode")),
                    self._times.start_timeout_s,
                    f"{worker_id} is the last decode worker now",
                )
            self._control.start_when_gone(worker_id)
            self._pool.drain(worker_id, LEAVE, self._times.drain_timeout_s)
            try:
                await self._until(
                    lambda: not worker.alive,
                    self._times.drain_timeout_s + self._times.stop_s,
                    f"{worker_id} did not leave",
                )
            except _Failed as error:
                log.warning("worker_ended worker=%s reason=%s", worker_id, error)
                self._control.start_now(worker_id)
        elif not self._starts_already(worker_id, never_joined=worker is None):
            self._control.start_now(worker_id)

        def is_back() -> bool:
            note = self._control.notes().get(worker_id)
            if note is not None and note != note_before and note.text and not note.starting:
                raise _Failed(f"{worker_id} did not come up: {note.text}")
            now = roster.workers.get(worker_id)
            return now is not None and now.takes_requests and now.hello.epoch != old_epoch

        within_s = self._times.start_timeout_s + self._times.stop_s
        await self._until(is_back, within_s, f"{worker_id} was started again and did not come up")

    def _starts_already(self, worker_id: str, never_joined: bool) -> bool:
        note = self._control.notes().get(worker_id)
        # Who has never joined and has not ended either is in its first start.
        return note.starting if note is not None else never_joined

    async def _until(self, holds: Callable[[], bool], timeout_s: float, or_else: str) -> None:
        """Raises `_Failed` at the deadline."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _Failed(f"{or_else} within {timeout_s:g} s; see its log")
            await self._pool.wait_for_change(min(left_s, LOOK_AGAIN_S))
