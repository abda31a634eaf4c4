"""Every way to split some GPUs into pools, under the same load: who is fast at what."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lab.load.plan import Session
from lab.load.summary import ClassSummary, summarize
from lab.load.work import WorkClass
from lab.planner.plan import TENSOR_PARALLEL, Asked
from lab.planner.steps import Steps
from lab.simulator.cluster import Outcome, Rules, SimulatedCluster
from lab.simulator.costs import PlannedCosts, Pools


@dataclass(frozen=True)
class Point:
    """One split, and what its clients saw."""

    pools: Pools
    total: ClassSummary
    prefill_use: float
    decode_use: float

    @property
    def ttft_s(self) -> float:
        """90th percentile."""
        return self.total.ttft_s.p90 if self.total.ttft_s.p90 is not None else float("inf")

    @property
    def itl_s(self) -> float:
        """99th percentile of all gaps."""
        return self.total.itl_s.p99 if self.total.itl_s.p99 is not None else float("inf")

    @property
    def attained(self) -> float:
        return self.total.attained or 0.0


def splits(asked: Asked) -> Iterator[Pools]:
    """Uses as many of the GPUs as each pair of sizes allows; sizes that leave no room for a prompt are left out."""
    needed = asked.work.prompt_tokens + asked.work.output_tokens
    sizes = [
        size
        for size in TENSOR_PARALLEL
        if Steps(asked.model, asked.gpu, size, asked.weight_bytes, asked.kv_bytes, asked.efficiency).kv_tokens > needed
    ]
    for prefill in sizes:
        for decode in sizes:
            for num_prefill in range(1, asked.num_gpus // prefill + 1):
                num_decode = (asked.num_gpus - num_prefill * prefill) // decode
                if num_decode:
                    yield Pools(num_prefill, prefill, num_decode, decode)


def sweep(
    asked: Asked,
    candidates: Sequence[Pools],
    rules: Rules,
    classes: Sequence[WorkClass],
    sessions: Sequence[Session],
    on_point: Callable[[Point], None] = lambda _point: None,
) -> list[Point]:
    """The same sessions for each."""
    points = []
    for pools in candidates:
        costs = PlannedCosts(asked, pools)
        cluster = SimulatedCluster(costs, pools.num_prefill, pools.num_decode, rules, classes)
        outcome = cluster.run(sessions)
        points.append(point_of(pools, classes, outcome))
        on_point(points[-1])
    return points


def with_limits_scaled(
    asked: Asked,
    candidates: Sequence[Pools],
    rules: Rules,
    classes: Sequence[WorkClass],
    sessions: Sequence[Session],
    factors: Sequence[float],
) -> dict[Pools, list[float]]:
    """Per split, the share of requests within both limits when these are so many times as long, in order of `factors`.

    Each is a run of its own: deadlines decide what the scheduler does.
    """
    found: dict[Pools, list[float]] = {pools: [] for pools in candidates}
    for factor in factors:
        scaled = [
            replace(
                work,
                ttft_s=None if work.ttft_s is None else work.ttft_s * factor,
                itl_s=None if work.itl_s is None else work.itl_s * factor,
            )
            for work in classes
        ]
        for point in sweep(asked, candidates, rules, scaled, sessions):
            found[point.pools].append(point.attained)
    return found


def point_of(pools: Pools, classes: Sequence[WorkClass], outcome: Outcome) -> Point:
    """What came of one run."""
    total = summarize(classes, outcome.records, outcome.seconds).total
    return Point(pools, total, outcome.prefill_use, outcome.decode_use)


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both TTFT and ITL, by TTFT."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.ttft_s, p.itl_s)):
        if not best or point.itl_s < best[-1].itl_s:
            best.append(point)
    return best
