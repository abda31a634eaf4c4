"""The plan of somebody who knows the day beforehand: the fewest workers that hold the targets at each rate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from lab.load.plan import plan_sessions
from lab.load.work import WorkClass
from lab.simulator.cluster import Rules, SimulatedCluster
from lab.simulator.costs import Costs
from lab.simulator.governed.cluster import Phase, attained


@dataclass(frozen=True)
class Workers:
    """Of both pools."""

    prefill: int
    decode: int


def fewest_workers(
    costs: Costs, rules: Rules, work: WorkClass, rate_per_s: float, goal: float, seconds: float
) -> Workers:
    """Found by trying, from the prefill workers that it takes at least."""
    work = replace(work, rate_per_s=rate_per_s)
    sessions = plan_sessions([work], seconds, 7)

    @cache
    def share(workers: Workers) -> float:
        cluster = SimulatedCluster(costs, workers.prefill, workers.decode, rules, [work])
        return attained(cluster.run(sessions).records, {work.name: work})

    busy = rate_per_s * costs.steps("prefill").prefill_s(work.prompt_tokens, rules.chunk_tokens)
    workers = Workers(max(1, ceil(busy)), 1)
    while share(workers) < goal:
        more = (Workers(workers.prefill + 1, workers.decode), Workers(workers.prefill, workers.decode + 1))
        workers = max(more, key=share)
    fewer = (Workers(workers.prefill - 1, workers.decode), Workers(workers.prefill, workers.decode - 1))
    return next((each for each in fewer if min(each.prefill, each.decode) > 0 and share(each) >= goal), workers)


def worker_seconds(phases: Sequence[Phase], plan: Sequence[Workers], start_s: float) -> float:
    """What the plan takes: each phase's workers, those that are new from `start_s` before it."""
    total = 0.0
    for index, (phase, workers) in enumerate(zip(phases, plan, strict=True)):
        total += phase.seconds * (workers.prefill + workers.decode)
        if index:
            before = plan[index - 1]
            total += start_s * (max(0, workers.prefill - before.prefill) + max(0, workers.decode - before.decode))
    return total
