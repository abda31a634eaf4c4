"""A day with a night, a plateau and a burst: `python -m lab.simulator.governed.day [--long] [--seed N]`.

The proxy's controller grows and shrinks the pools; beside it, what somebody would take who knows the day beforehand.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lab.load.work import parse_work
from lab.planner.capacity import Workload
from lab.planner.gpus import GPUS
from lab.planner.models import MODELS
from lab.planner.plan import Asked
from lab.simulator.cluster import Rules
from lab.simulator.costs import PlannedCosts, Pools
from lab.simulator.governed.clairvoyant import Workers, fewest_workers, worker_seconds
from lab.simulator.governed.cluster import Governed, GovernedCluster, Phase, day_sessions
from proxy.scaling.rules import Bounds, ScalingRules
from proxy.scheduling.view import Role

GOAL = 0.95
"""Share of requests within both targets, for either plan."""
START_S = 10.0
"""Until a worker that is ordered serves."""
WORK = parse_work("documents=1/s,24000+4,ttft=8,itl=0.2")
ASKED = Asked(MODELS["llama-3.1-8b"], GPUS["l40s"], 8, Workload(WORK.prompt_tokens, WORK.output_tokens, 8.0, 0.2))
COSTS = PlannedCosts(ASKED, Pools(1, 1, 1, 1))
RULES = Rules(on_overload="demote", queue_timeout_s=300)
_BOUNDS: dict[Role, Bounds] = {"prefill": Bounds(1, 30), "decode": Bounds(1, 30)}


@dataclass(frozen=True)
class Day:
    """What comes, and how patient the controller is."""

    phases: tuple[Phase, ...]
    scaling: ScalingRules
    cv: float
    """Of the times between arrivals."""

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def _phases(night_s: float, plateau_s: float, burst_s: float, evening_s: float) -> tuple[Phase, ...]:
    return (
        Phase(0.9, night_s, "night"),
        Phase(3.3, plateau_s, "plateau"),
        Phase(5.0, burst_s, "burst"),
        Phase(3.3, evening_s, "evening"),
        Phase(0.9, 2 * night_s, "night"),
    )


# So few requests fall into the short day's spans that chance would make up most of what the controller sees; more even
# arrivals stand for more requests.
SHORT = Day(_phases(350, 900, 120, 300), ScalingRules(_BOUNDS, window_s=30, hold_s=100), cv=0.5)
LONG = Day(_phases(3600, 7200, 900, 3600), ScalingRules(_BOUNDS), cv=1.0)


def clairvoyant(day: Day, seconds: float = 300.0) -> dict[float, Workers]:
    """By rate, the fewest workers that hold the targets, found by simulating each rate for so long."""
    rates = sorted({phase.rate_per_s for phase in day.phases})
    return {rate: fewest_workers(COSTS, RULES, WORK, rate, GOAL, seconds) for rate in rates}


def live_through(day: Day, plan: Mapping[float, Workers], seed: int) -> tuple[Governed, float]:
    """The day, and the worker-seconds of the plan. The cluster begins with what the plan begins with."""
    first = plan[day.phases[0].rate_per_s]
    cluster = GovernedCluster(COSTS, first.prefill, first.decode, RULES, [WORK], day.scaling, START_S)
    governed = cluster.govern(day_sessions(WORK, day.phases, seed, day.cv), day.seconds)
    return governed, worker_seconds(day.phases, [plan[phase.rate_per_s] for phase in day.phases], START_S)


def main() -> int:
    """Prints what came of it; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.simulator.governed.day", description="An autoscaled cluster over a day."
    )
    parser.add_argument("--long", action="store_true", help="six hours instead of 45 minutes; takes about a minute")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals")
    options = parser.parse_args()
    day, out = LONG if options.long else SHORT, Console(highlight=False)
    plan = clairvoyant(day)
    governed, planned_s = live_through(day, plan, options.seed)
    table = Table("phase", "requests/s", "seconds", "known beforehand: P + D", "changes of the autoscaler", box=None)
    start_s = 0.0
    for phase in day.phases:
        changes = [c for c in governed.changes if start_s <= c.at_s < start_s + phase.seconds]
        shown = ", ".join(f"{c.at_s - start_s:.0f} s: {c.count} {c.role[0].upper()}" for c in changes)
        known = plan[phase.rate_per_s]
        table.add_row(
            phase.name,
            f"{phase.rate_per_s:g}",
            f"{phase.seconds:g}",
            f"{known.prefill} + {known.decode}",
            shown,
        )
        start_s += phase.seconds
    out.print(table)
    out.print(
        f"{len(governed.outcome.records):,} requests, {100 * governed.attained:.1f} % within both targets; "
        f"{governed.worker_s / 3600:.2f} worker-hours, {governed.worker_s / planned_s:.3f} times those of the plan.",
        soft_wrap=True,
    )
    for warning in sorted(governed.warnings):
        out.print(f"The autoscaler said: {warning}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
