"""What makes the next worker of a pool: its id, its place on the machine, and the command that starts it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.config import Role
from cluster.launch.local import WorkerCommand
from cluster.launch.seats import NothingFree
from cluster.launch.worker_plan import WorkerPlan


class Planner(Protocol):
    """Who knows what is free: a `WorkerPlanner` of `cluster.launch`, or a `SimulatedPlanner` of `cluster.simulated`."""

    @property
    def devices(self) -> int | None: ...
    def next(self, role: Role) -> WorkerPlan: ...
    def left(self, worker_id: str) -> None: ...


@dataclass(slots=True)
class Recruiter:
    """`command_for` writes a worker's settings and says how to start it, in a process of its own."""

    planner: Planner
    command_for: Callable[[WorkerPlan], WorkerCommand]

    def hire(self, role: Role, count: int) -> list[WorkerCommand]:
        """So many more workers of a pool. Raises `NothingFree`, and then hires nobody, and `OSError`."""
        plans: list[WorkerPlan] = []
        try:
            plans.extend(self.planner.next(role) for _ in range(count))  # keeps those before the one that fails
            return [self.command_for(plan) for plan in plans]
        except (NothingFree, OSError):
            for plan in plans:
                self.planner.left(plan.worker_id)
            raise

    def left(self, worker_id: str) -> None:
        """Nothing is left of a worker that was removed; others may have its place."""
        self.planner.left(worker_id)
