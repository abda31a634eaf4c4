"""Which workers, how many of each, and whether separating them pays. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.preflight.memory.model_shape import ModelShape
from lab.planner.capacity import Capacity, Workload, colocated_capacity, decode_capacity, prefill_capacity
from lab.planner.gpus import Gpu
from lab.planner.steps import BOUNDS, EXPECTED, Efficiency, Steps, transfer_s

TENSOR_PARALLEL = (1, 2, 4, 8)
_PAYS_FROM = 1.05
_LOSES_BELOW = 0.95


class NothingFits(Exception):
    """No number of ranks carries the work; a sentence per number of ranks."""


@dataclass(frozen=True)
class Asked:
    """What is to be planned."""

    model: ModelShape
    gpu: Gpu
    num_gpus: int
    work: Workload
    weight_bytes: float = 2
    kv_bytes: float = 2
    efficiency: Efficiency = EXPECTED
    gpus_per_machine: int = 8


@dataclass(frozen=True)
class Ranks:
    """One number of ranks per worker, and what it can do."""

    tensor_parallel: int
    kv_tokens: int
    prefill_bound_s: float
    prefill_s: float
    decode_bound_s: float
    """A step over one sequence: no system is faster."""
    decode_s: float
    prefill: Capacity
    decode: Capacity
    colocated: Capacity


@dataclass(frozen=True)
class Plan:
    """The best separated pools, the best colocated workers, and their ratio."""

    asked: Asked
    ranks: tuple[Ranks, ...]
    num_prefill: int
    prefill_tp: int
    num_decode: int
    decode_tp: int
    rate_per_s: float
    transfer_s: float
    """Of one prompt's KV, were it all moved at the end."""
    transfer_same_machine: bool
    num_colocated: int
    colocated_tp: int
    colocated_rate_per_s: float

    @property
    def ratio(self) -> float | None:
        """Goodput of separated pools over that of colocated workers on as many GPUs; None if these carry nothing."""
        return self.rate_per_s / self.colocated_rate_per_s if self.colocated_rate_per_s else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Of output, at full load."""
        return self._usd(self.rate_per_s)

    @property
    def colocated_usd_per_million_tokens(self) -> float | None:
        return self._usd(self.colocated_rate_per_s)

    def _usd(self, rate_per_s: float) -> float | None:
        per_hour = rate_per_s * self.asked.work.output_tokens * 3600
        return self.asked.num_gpus * self.asked.gpu.usd_per_hour / per_hour * 1e6 if per_hour else None

    @property
    def verdict(self) -> str:
        """Whether to separate, in a sentence or two."""
        ratio = self.ratio
        if not self.rate_per_s and not self.colocated_rate_per_s:
            return "Nothing on these GPUs meets both limits: loosen them, or take more or other GPUs."
        if not self.rate_per_s:
            return "Do not separate: these GPUs are too few for a pool of each kind within both limits."
        if ratio is None:
            return "Separate: no colocated worker meets both limits, separated pools do."
        if ratio >= _PAYS_FROM:
            return f"Separate: {ratio:.2f} times the goodput of the best colocated workers on as many GPUs."
        if ratio <= _LOSES_BELOW:
            return f"Do not separate: it would give {ratio:.2f} times the goodput of colocated workers."
        return (
            f"It hardly matters ({ratio:.2f} times the goodput): separate for steadier gaps between tokens, or do not."
        )


def make_plan(asked: Asked) -> Plan:
    """Tries every number of ranks and every split of the GPUs. Raises `NothingFits`."""
    ranks = tuple(_of_ranks(asked, count) for count in TENSOR_PARALLEL if count <= asked.num_gpus)
    if not any(r.kv_tokens for r in ranks):
        raise NothingFits("; ".join(f"TP {r.tensor_parallel}: {r.decode.why_not}" for r in ranks))
    best = max(_splits(asked, ranks), key=lambda s: (s[0], -s[2] * s[1].tensor_parallel))
    rate, prefill, num_prefill, decode, num_decode = best
    colocated = max(ranks, key=lambda r: (asked.num_gpus // r.tensor_parallel) * r.colocated.rate_per_s)
    num_colocated = asked.num_gpus // colocated.tensor_parallel
    same_machine = asked.num_gpus <= asked.gpus_per_machine
    from_, to = (_steps(asked, r.tensor_parallel, asked.efficiency) for r in (prefill, decode))
    return Plan(
        asked=asked,
        ranks=ranks,
        num_prefill=num_prefill,
        prefill_tp=prefill.tensor_parallel,
        num_decode=num_decode,
        decode_tp=decode.tensor_parallel,
        rate_per_s=rate,
        transfer_s=transfer_s(from_, to, asked.work.prompt_tokens, same_machine=same_machine),
        transfer_same_machine=same_machine,
        num_colocated=num_colocated,
        colocated_tp=colocated.tensor_parallel,
        colocated_rate_per_s=num_colocated * colocated.colocated.rate_per_s,
    )


def fewest_gpus(asked: Asked, rate_per_s: float, at_most: int = 1024) -> Plan | None:
    """The smallest number of GPUs whose separated pools carry a rate; None if `at_most` do not. Steps grow with it."""
    num_gpus = 1
    while num_gpus <= at_most:
        try:
            plan = make_plan(replace(asked, num_gpus=num_gpus))
        except NothingFits:
            plan = None
        if plan is not None and plan.rate_per_s >= rate_per_s:
            return plan
        num_gpus += 1 if num_gpus < 32 else 8
    return None


def _steps(asked: Asked, tensor_parallel: int, efficiency: Efficiency) -> Steps:
    return Steps(asked.model, asked.gpu, tensor_parallel, asked.weight_bytes, asked.kv_bytes, efficiency)


def _of_ranks(asked: Asked, tensor_parallel: int) -> Ranks:
    work = asked.work
    bound = _steps(asked, tensor_parallel, BOUNDS)
    steps = _steps(asked, tensor_parallel, asked.efficiency)
    return Ranks(
        tensor_parallel=tensor_parallel,
        kv_tokens=steps.kv_tokens,
        prefill_bound_s=bound.prefill_s(work.prompt_tokens),
        prefill_s=steps.prefill_s(work.prompt_tokens),
        decode_bound_s=bound.step_s(1, 0),
        decode_s=steps.step_s(1, work.context_tokens),
        prefill=prefill_capacity(steps, work),
        decode=decode_capacity(steps, work),
        colocated=colocated_capacity(steps, work),
    )


def _splits(asked: Asked, ranks: Sequence[Ranks]) -> list[tuple[float, Ranks, int, Ranks, int]]:
    """(rate, prefill ranks, number of prefill workers, decode ranks, number of decode workers)."""
    splits = []
    for prefill in ranks:
        for decode in ranks:
            for num_prefill in range(1, asked.num_gpus // prefill.tensor_parallel + 1):
                left = asked.num_gpus - num_prefill * prefill.tensor_parallel
                num_decode = left // decode.tensor_parallel
                rate = min(num_prefill * prefill.prefill.rate_per_s, num_decode * decode.decode.rate_per_s)
                splits.append((rate, prefill, num_prefill, decode, num_decode))
    return splits
