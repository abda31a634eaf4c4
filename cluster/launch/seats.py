"""Deals cores and GPUs to workers as they start, and takes back those of workers that have left for good."""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import ROLES, PoolConfig, Role
from cluster.preflight.machine import Machine

BIND = "VLLM_CPU_OMP_THREADS_BIND"
DEVICES = "CUDA_VISIBLE_DEVICES"


class NothingFree(Exception):
    """There is no place for another worker; a sentence for the operator."""


@dataclass(frozen=True)
class Seat:
    """Where a worker computes."""

    worker_id: str
    cores: tuple[tuple[int, ...], ...]
    """Per rank; empty on GPUs and where vLLM or the operator decides."""
    env: Mapping[str, str]


class Seats:
    """Those of one machine. A worker id is never given out twice."""

    def __init__(self, machine: Machine, core_shares: Sequence[tuple[int, ...]]) -> None:
        """`core_shares`: per rank, where workers compute on CPUs."""
        self._machine = machine
        self._units: Sequence[tuple[int, ...] | str] = list(core_shares) if machine.on_cpu else list(machine.gpus)
        self._free = list(range(len(self._units)))
        self._taken: dict[str, list[int]] = {}
        self._next = dict.fromkeys(ROLES, 0)

    def take(self, role: Role, pool: PoolConfig) -> Seat:
        """A place for the next worker of a pool; raises `NothingFree`."""
        mine: list[int] = []
        if not self._others_decide(pool):
            if len(self._free) < pool.tensor_parallel:
                raise NothingFree(self._nothing_free(role, pool.tensor_parallel))
            mine, self._free = self._free[: pool.tensor_parallel], self._free[pool.tensor_parallel :]
        worker_id = f"{role}-{self._next[role]}"
        self._next[role] += 1
        self._taken[worker_id] = mine
        units = [self._units[number] for number in mine]
        if self._machine.on_cpu:
            cores = tuple(unit for unit in units if not isinstance(unit, str))
            bound = "|".join(",".join(str(cpu) for cpu in of_rank) for of_rank in cores)
            return Seat(worker_id, cores, {BIND: bound} if cores else {})
        return Seat(worker_id, (), {DEVICES: ",".join(map(str, units))} if units else {})

    def give_back(self, worker_id: str) -> None:
        """Nothing is left of this worker. Unknown ones are ignored."""
        for number in self._taken.pop(worker_id, []):
            insort(self._free, number)

    def count_for(self, pools: Sequence[PoolConfig]) -> int | None:
        """Devices that are dealt to these pools; None if those of one of them are not."""
        return None if any(self._others_decide(pool) for pool in pools) else len(self._units)

    def _others_decide(self, pool: PoolConfig) -> bool:
        if self._machine.elsewhere:
            return True
        if self._machine.on_cpu:
            return BIND in pool.env or bool(self._machine.environ.get(BIND))
        return DEVICES in pool.env

    def _nothing_free(self, role: Role, needed: int) -> str:
        holders = ", ".join(worker_id for worker_id, numbers in self._taken.items() if numbers)
        if self._machine.on_cpu:
            return (
                f"no cores are free for another {role} worker: it needs {needed} of the {len(self._units)} shares into "
                f"which this machine's cores were divided when the cluster started, and {len(self._free)} are left; "
                f"{holders} have the others. Remove a worker first, or start the cluster with a larger "
                f"autoscale.{role}.max, which keeps cores for workers to come"
            )
        return (
            f"no GPUs are free for another {role} worker: it needs {needed}, this machine has {len(self._units)} and "
            f"{len(self._free)} are left; {holders} have the others. Remove a worker first"
        )
