"""What operators may do to workers: let one leave, change its role, start workers again one after another, give a pool
another number of them.

Refuses by name what cannot be done. Everything accepted goes on by itself and has an end; the status shows it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from cluster.config import ROLES
from cluster.launch.seats import NothingFree
from cluster.messages import LEAVE
from cluster.orders import Accepted, DrainOrder, RestartOrder, RoleOrder, RollingStatus, ScaleOrder
from cluster.status import AutoscaleStatus, LaunchNote
from proxy.supervision import log_failure
from proxy.workers.resizing import Resizing
from proxy.workers.rolling_restart import RollingRestart, RollingTimes, WorkerControl
from proxy.workers.roster import Roster, Worker, role_named_in
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")


class Steers(Protocol):
    """`proxy.workers.steering.Steering`."""

    @property
    def status(self) -> AutoscaleStatus: ...


class OrderRefused(Exception):
    """An order that is not carried out; the text says why, `status` is that of the reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Administration:
    """Used on the proxy's event loop. Without `control` the processes belong to somebody else: no restarts."""

    def __init__(self, pool: WorkerPool, control: WorkerControl | None, times: RollingTimes) -> None:
        self._pool = pool
        self._control = control
        self._times = times
        self.resizing = Resizing(pool, control, times) if control is not None else None
        self.steering: Steers | None = None
        """Who gives orders about the numbers of workers beside the operator."""
        self.is_awake: Callable[[], bool] = lambda: True
        """Whether the workers are not asleep (`proxy.workers.sleeping`); while they are, nothing is done to them."""
        self._rolling: RollingRestart | None = None
        self._other: RollingStatus | None = None
        """Of a process that is no worker, if that was the last one."""
        self._task: asyncio.Task[None] | None = None

    @property
    def rolling(self) -> RollingStatus | None:
        """The last rolling restart."""
        if self._other is not None:
            return self._other
        return self._rolling.status if self._rolling is not None else None

    def notes(self) -> Mapping[str, LaunchNote]:
        """By worker id, what the launcher has to say."""
        return self._control.notes() if self._control is not None else {}

    @property
    def leaving(self) -> frozenset[str]:
        """Workers that are being removed."""
        return frozenset(self.resizing.leaving) if self.resizing is not None else frozenset()

    def drain(self, worker_id: str, order: DrainOrder) -> Accepted:
        """Raises `OrderRefused`."""
        self._refuse_while_asleep()
        worker = living(self._pool.roster, worker_id)
        if not order.force:
            spare_last_decoder(self._pool.roster, worker)
        timeout_s = order.timeout_s or self._times.drain_timeout_s
        if self._control is not None:
            self._control.keep_down(worker_id)
        self._pool.drain(worker_id, LEAVE, timeout_s)
        return Accepted(f"{worker_id} finishes what it has and leaves", [worker_id], timeout_s + self._times.stop_s)

    def set_role(self, worker_id: str, order: RoleOrder) -> Accepted:
        """Raises `OrderRefused`. The role that it has is no change."""
        self._refuse_while_asleep()
        worker = living(self._pool.roster, worker_id)
        if worker.drains_to == LEAVE:
            raise OrderRefused(409, f"worker {worker_id} is leaving and changes its role no more")
        timeout_s = order.timeout_s or self._times.drain_timeout_s
        if worker.role == order.role and not worker.drains_to:
            return Accepted(f"{worker_id} serves as {order.role} already", [worker_id], 0.0)
        if order.role != "decode" and not order.force:
            spare_last_decoder(self._pool.roster, worker)
        self._pool.drain(worker_id, order.role, timeout_s)
        within_s = timeout_s + self._times.stop_s
        return Accepted(f"{worker_id} finishes what it has and then serves as {order.role}", [worker_id], within_s)

    def restart(self, order: RestartOrder) -> Accepted:
        """Raises `OrderRefused`."""
        self._refuse_while_asleep()
        control = self._control
        if control is None:
            raise OrderRefused(409, "these workers were not started by this server; restart them where they run")
        self._refuse_during_a_restart()
        if order.workers in self.leaving:
            raise OrderRefused(409, f"worker {order.workers} is being removed and is not started again")
        if control.knows(order.workers) and order.workers not in self._known():
            # An API server. Nothing would be finished by waiting: its connections stay as long as clients like.
            control.start_now(order.workers)
            self._other = RollingStatus([order.workers], [order.workers])
            return Accepted(f"starting {order.workers} again", [order.workers], self._times.start_timeout_s)
        worker_ids = self._chosen(order.workers, control)
        if not order.force and self._decodes_alone(worker_ids):
            raise OrderRefused(
                409,
                "there is no other decode worker, so requests would have to wait while it starts; add --force if that "
                "is wanted",
            )
        timeout_s = order.timeout_s or self._times.drain_timeout_s
        times = RollingTimes(timeout_s, self._times.start_timeout_s, self._times.stop_s)
        self._other = None
        self._rolling = RollingRestart(self._pool, control, worker_ids, times, order.force)
        self._task = asyncio.create_task(self._rolling.run(), name="rolling-restart")
        self._task.add_done_callback(log_failure)
        names = ", ".join(worker_ids)
        return Accepted(f"starting {names} again", worker_ids, times.of_one_s * len(worker_ids))

    def scale(self, order: ScaleOrder) -> Accepted:
        """Raises `OrderRefused`. The number of workers that a pool has is no change."""
        self._refuse_while_asleep()
        if self.resizing is None:
            raise OrderRefused(409, "these workers were not started by this server; start and stop them where they run")
        if order.pool == "decode" and order.replicas == 0:
            raise OrderRefused(409, "without decode workers every request would have to wait; leave at least one")
        self._refuse_during_a_restart()
        try:
            return self.resizing.resize(order.pool, order.replicas, order.timeout_s or self._times.drain_timeout_s)
        except NothingFree as error:
            raise OrderRefused(409, str(error)) from error

    @property
    def restarts(self) -> bool:
        """A rolling restart is under way."""
        return self._task is not None and not self._task.done()

    def _refuse_while_asleep(self) -> None:
        if not self.is_awake():
            raise OrderRefused(409, "the workers sleep, fall asleep or wake up; wake them first")

    def _refuse_during_a_restart(self) -> None:
        if self.restarts:
            assert self._rolling is not None
            doing = ", ".join(self._rolling.status.workers)
            raise OrderRefused(409, f"a restart of {doing} is under way; wait until it has ended")

    def _chosen(self, workers: str, control: WorkerControl) -> list[str]:
        roster, known = self._pool.roster, self._known()
        if workers in ("all", *ROLES):
            chosen = [name for name in known if workers == "all" or _role(roster, name) == workers]
        else:
            chosen = [name for name in known if name == workers]
        if not chosen:
            raise OrderRefused(404, f"no worker {workers} is known; there are {', '.join(known)}, or `all`")
        if foreign := [name for name in chosen if not control.knows(name)]:
            raise OrderRefused(
                409,
                f"{', '.join(foreign)}: no process of its own that this server started (simulated workers share one "
                "unless simulation.workers_per_process=1)",
            )
        # Who is away cannot be missed, and may stand in for the others.
        alive = {worker.worker_id for worker in roster.alive()}
        return sorted(chosen, key=alive.__contains__)

    def _known(self) -> list[str]:
        """Ids of all workers that stay, also of those that have not come."""
        roster = self._pool.roster
        ids = [*roster.workers, *(name for name in roster.expected if name not in roster.workers)]
        return sorted((name for name in ids if name not in self.leaving), key=_by_kind_and_number)

    def _decodes_alone(self, worker_ids: list[str]) -> bool:
        """One of them is the only decode worker, and none of them is started before it leaves."""
        decoders = [worker.worker_id for worker in self._pool.roster.taking_requests("decode")]
        others = [name for name in worker_ids if _role(self._pool.roster, name) == "decode" and name not in decoders]
        return len(decoders) == 1 and decoders[0] in worker_ids and not others

    def close(self) -> None:
        """Ends a rolling restart where it is, and waits for nobody who leaves."""
        if self.resizing is not None:
            self.resizing.close()
        if self._task is not None:
            self._task.cancel()


def living(roster: Roster, worker_id: str) -> Worker:
    """The worker, if it is alive; raises `OrderRefused`."""
    worker = roster.workers.get(worker_id)
    if worker is None:
        known = ", ".join(sorted({*roster.workers, *roster.expected}, key=_by_kind_and_number))
        what = "has not joined yet" if worker_id in roster.expected else f"is not known; there are {known}"
        raise OrderRefused(409 if worker_id in roster.expected else 404, f"worker {worker_id} {what}")
    if not worker.alive:
        cause = roster.causes.get(worker_id, "")
        raise OrderRefused(409, f"worker {worker_id} is not alive" + (f": {cause}" if cause else ""))
    return worker


def spare_last_decoder(roster: Roster, worker: Worker) -> None:
    """Raises `OrderRefused` if without it nobody takes decode requests."""
    if roster.taking_requests("decode") == [worker]:
        raise OrderRefused(
            409,
            f"worker {worker.worker_id} is the last decode worker, so every request would have to wait; add --force if "
            "that is wanted",
        )


def _role(roster: Roster, worker_id: str) -> str:
    worker = roster.workers.get(worker_id)
    return worker.role if worker is not None else role_named_in(worker_id)


def _by_kind_and_number(worker_id: str) -> tuple[bool, str, int, str]:
    """prefill-2 before prefill-10 before decode-0."""
    kind, _, number = worker_id.rpartition("-")
    return kind != "prefill", kind, int(number) if number.isdigit() else 0, worker_id
