"""The controller of the proxy in a simulated cluster: a day, and load that moves from one pool to the other."""

import pytest

from lab.simulator.governed.clairvoyant import Workers, fewest_workers
from lab.simulator.governed.cluster import GovernedCluster, Phase, day_sessions
from lab.simulator.governed.day import COSTS, GOAL, RULES, SHORT, WORK, live_through
from proxy.scaling.autoscaler import Autoscaler
from proxy.scaling.look import Decision, Look

# `clairvoyant(SHORT)` finds these in some ten seconds.
KNOWN_BEFOREHAND = {0.9: Workers(3, 1), 3.3: Workers(9, 2), 5.0: Workers(13, 2)}
SETTLES_WITHIN_S = 2 * SHORT.scaling.hold_s


@pytest.mark.parametrize("seed", [5, 13])
def test_a_day_is_held_at_little_more_than_it_takes_and_the_plateau_sees_no_change(seed: int) -> None:
    governed, planned_s = live_through(SHORT, KNOWN_BEFOREHAND, seed)
    assert governed.attained >= GOAL
    assert governed.worker_s <= 1.15 * planned_s
    starts_s = SHORT.phases[0].seconds + SETTLES_WITHIN_S
    ends_s = SHORT.phases[0].seconds + SHORT.phases[1].seconds
    assert [change for change in governed.changes if starts_s < change.at_s <= ends_s] == []
    assert {change.role for change in governed.changes} == {"prefill", "decode"}
    assert all(not record.error for record in governed.outcome.records)


def test_the_plan_to_compare_with_is_the_smallest_that_holds() -> None:
    assert fewest_workers(COSTS, RULES, WORK, 0.9, GOAL, 300) == KNOWN_BEFOREHAND[0.9]


class Script(Autoscaler):
    """Decides what it was told to, in turn."""

    def __init__(self, *decisions: Decision) -> None:
        super().__init__(SHORT.scaling)
        self.decisions = list(decisions)

    def decide(self, look: Look) -> Decision:
        if self.decisions:
            return self.decisions.pop(0)
        return Decision({role: size.count for role, size in look.pools.items()})


def test_workers_change_their_role_when_they_have_finished_and_no_request_is_lost() -> None:
    cluster = GovernedCluster(COSTS, 4, 1, RULES, [WORK], SHORT.scaling, 10)
    cluster._autoscaler = Script(Decision({"prefill": 2, "decode": 3}, 2), Decision({"prefill": 4, "decode": 1}, -2))
    governed = cluster.govern(day_sessions(WORK, [Phase(1.0, 60)], 1), 60)
    assert [(change.role, change.count) for change in governed.changes] == [
        *(("prefill", 2), ("decode", 3)),
        *(("prefill", 4), ("decode", 1)),
    ]
    assert governed.worker_s == 5 * 60, "nobody came and nobody left"
    assert all(not record.error and record.tokens == WORK.output_tokens for record in governed.outcome.records)
