"""The controller alone: fed with looks, asked for sizes."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.scaling.autoscaler import Autoscaler
from proxy.scaling.decode_need import BatchCosts
from proxy.scaling.load import Load
from proxy.scaling.look import Arrivals, Batch, Decision, Look, Measured, PoolSize
from proxy.scaling.prefill_need import prefill_workers, share_late
from proxy.scaling.rules import Bounds, ScalingRules
from proxy.scheduling.view import Role

WIDE: dict[Role, Bounds] = {"prefill": Bounds(1, 40), "decode": Bounds(1, 40)}
RULES = ScalingRules(WIDE, window_s=40, hold_s=100)
BLOCKS, BLOCKS_PER_REQUEST = 1000, 50


@dataclass
class Situation:
    """A cluster whose workers come at once and do as they should."""

    rules: ScalingRules = RULES
    sizes: dict[Role, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    prompt_s: float = 1.0
    target_s: float = 4.0
    step_s: float = 0.03
    made: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(self.rules)

    def look(self, per_look: int, at_once: int, measured: Measured | None = None, coming: int = 0) -> Look:
        decoding = self.sizes["decode"]
        batches = tuple(
            Batch(n, n, self.step_s + 0.0002 * n, n * BLOCKS_PER_REQUEST, BLOCKS, 256)
            for n in [at_once // decoding + (number < at_once % decoding) for number in range(decoding)]
        )
        arrivals = (Arrivals(self.target_s, 0.1, True, per_look, (self.prompt_s,) * min(64, per_look)),)
        return Look(
            self.rules.every_s,
            {role: PoolSize(count - coming, coming) for role, count in self.sizes.items()},
            arrivals if per_look else (),
            batches=batches,
            measured=measured or Measured(per_look, 0, 0, per_look, 0),
        )

    def live(self, seconds: float, per_look: int, at_once: int = 4, measured: Measured | None = None) -> list[Decision]:
        """Looks at constant load; the sizes follow what is decided."""
        decisions = []
        for _ in range(round(seconds / self.rules.every_s)):
            decision = self.autoscaler.decide(self.look(per_look, at_once, measured))
            self.sizes = dict(decision.want)
            decisions.append(decision)
        self.made += decisions
        return decisions

    def changes(self, decisions: list[Decision]) -> list[str]:
        return [reason for decision in decisions for reason in decision.reasons]


# -------------------------------------------------------------------------------------------------- properties


@st.composite
def looks(draw: st.DrawFn) -> Iterator[tuple[int, int, Measured]]:
    count = draw(st.integers(0, 200))
    late = draw(st.integers(0, count))
    return count, draw(st.integers(0, 300)), Measured(count, late, draw(st.integers(0, 20)), count, late // 2)


@settings(max_examples=60)
@given(
    st.lists(looks(), min_size=1, max_size=40),
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
    st.one_of(st.none(), st.integers(2, 12)),
    st.floats(0.01, 8.0),
)
def test_whatever_comes_pools_stay_within_their_bounds(
    seen: list[tuple[int, int, Measured]],
    prefill: tuple[int, int],
    decode: tuple[int, int],
    devices: int | None,
    prompt_s: float,
) -> None:
    bounds: dict[Role, Bounds] = {
        "prefill": Bounds(prefill[0], sum(prefill)),
        "decode": Bounds(max(1, decode[0]), max(1, sum(decode))),
    }
    start: dict[Role, int] = {role: each.least for role, each in bounds.items()}
    devices = max(devices, sum(start.values())) if devices is not None else None
    rules = ScalingRules(bounds, devices=devices)
    situation = Situation(rules, dict(start), prompt_s=prompt_s)
    for per_look, at_once, measured in seen:
        before = dict(situation.sizes)
        decision = situation.live(rules.every_s, per_look, at_once, measured)[0]
        for role, each in bounds.items():
            assert each.least <= decision.want[role] <= each.most
        assert decision.want["decode"] >= 1
        if devices is not None:
            assert sum(decision.want.values()) <= devices
        gained = {role: decision.want[role] - before[role] for role in before}
        assert decision.convert <= max(0, gained["decode"])
        assert -decision.convert <= max(0, gained["prefill"])
        assert bool(decision.reasons) == (before != dict(decision.want)) or decision.warnings


@settings(max_examples=15)
@given(st.integers(0, 60), st.integers(0, 120), st.floats(0.05, 3.9), st.integers(1, 30))
def test_at_constant_load_a_pool_that_found_its_size_keeps_it(
    per_look: int, at_once: int, prompt_s: float, start: int
) -> None:
    situation = Situation(sizes={"prefill": start, "decode": start}, prompt_s=prompt_s)
    situation.live(3 * RULES.hold_s, per_look, at_once)
    assert situation.changes(situation.live(3 * RULES.hold_s, per_look, at_once)) == []


@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60))
def test_more_work_never_gets_fewer_workers(per_look: int, more: int, at_once: int, more_at_once: int) -> None:
    small, large = Situation(), Situation()
    small.live(3 * RULES.hold_s, per_look, at_once)
    large.live(3 * RULES.hold_s, per_look + more, at_once + more_at_once)
    assert all(large.sizes[role] >= small.sizes[role] for role in small.sizes)


@given(st.floats(0.1, 20), st.floats(0.1, 5), st.floats(0.1, 10), st.booleans())
def test_with_every_worker_more_fewer_are_late(load: float, service_s: float, target_s: float, gives_way: bool) -> None:
    shares = [share_late(count, load, [service_s], target_s, gives_way=gives_way) for count in range(1, 40)]
    assert all(0 <= share <= 1 for share in shares)
    if target_s > service_s:
        assert shares[-1] < 0.05
        assert all(fewer >= more - 1e-9 for fewer, more in pairwise(shares))


# -------------------------------------------------------------------------------------------------- growing


def test_a_jump_of_the_load_is_answered_within_a_quarter_of_the_window() -> None:
    situation = Situation()
    situation.live(RULES.hold_s, 5)
    before = situation.sizes["prefill"]
    situation.live(RULES.window_s / 4, 40)
    assert situation.sizes["prefill"] > 1.5 * before
    situation.live(RULES.window_s, 40)
    assert situation.sizes["prefill"] >= 7, "what is surely there of eight seconds of work per second"
    situation.live(RULES.hold_s, 40)
    assert 9 <= situation.sizes["prefill"] <= 11


def test_a_pool_that_changed_takes_the_size_for_the_average_once_and_then_wants_proof() -> None:
    situation = Situation()
    situation.live(RULES.hold_s, 5)
    situation.live(2 * RULES.hold_s, 40)
    assert situation.sizes["prefill"] == 9, "room for half the margin beside eight seconds of work per second"
    for per_look in (44, 36):
        assert situation.changes(situation.live(RULES.hold_s, per_look)) == [], "a tenth more or less may be chance"


def test_workers_who_came_for_what_waited_leave_when_it_has_been_worked_off() -> None:
    situation = Situation(sizes={"prefill": 2, "decode": 1})
    situation.live(RULES.hold_s / 2, 5)
    calm = situation.sizes["prefill"]
    for _ in range(8):
        look = replace(situation.look(5, 4), queued_prefill_s=4 * RULES.hold_s)
        situation.sizes = dict(situation.autoscaler.decide(look).want)
    assert situation.sizes["prefill"] > calm + 1
    situation.live(RULES.hold_s, 5)
    assert situation.sizes["prefill"] == calm


def test_prompts_that_wait_count_beside_those_that_come() -> None:
    situation = Situation(sizes={"prefill": 2, "decode": 1})
    situation.live(RULES.hold_s, 5)
    calm = situation.autoscaler.decide(situation.look(5, 4)).want["prefill"]
    queue = replace(situation.look(5, 4), queued_prefill_s=4 * RULES.hold_s)
    assert situation.autoscaler.decide(queue).want["prefill"] >= calm + 3


def test_misses_that_the_computation_does_not_expect_bring_a_worker_more() -> None:
    situation = Situation(sizes={"prefill": 2, "decode": 1})
    situation.live(RULES.hold_s, 5)
    computed = situation.sizes["prefill"]
    late = Measured(50, 20, 0, 50, 0)
    decisions = situation.live(RULES.window_s, 5, measured=late)
    assert situation.sizes["prefill"] == computed + 1
    (reason,) = situation.changes(decisions)
    assert reason.endswith("% of answers miss the target for the first token")
    assert situation.changes(situation.live(2 * RULES.hold_s, 5)) == [], "it helped, so it stays"


def test_if_that_does_not_help_it_is_taken_back_and_said() -> None:
    situation = Situation(sizes={"prefill": 2, "decode": 1})
    situation.live(RULES.hold_s, 5)
    computed = situation.sizes["prefill"]
    decisions = situation.live(4 * RULES.hold_s, 5, measured=Measured(50, 20, 0, 50, 0))
    assert situation.sizes["prefill"] == computed
    assert max(decision.want["prefill"] for decision in decisions) == computed + 1
    assert "more prefill workers did not help" in decisions[-1].warnings[-1]


def test_workers_that_misses_brought_leave_with_the_load() -> None:
    situation = Situation(sizes={"prefill": 2, "decode": 1})
    situation.live(RULES.hold_s, 5)
    situation.live(RULES.window_s, 5, measured=Measured(50, 20, 0, 50, 20))
    assert situation.sizes == {"prefill": 3, "decode": 2}
    situation.live(2 * RULES.hold_s, 0, 0)
    assert situation.sizes == {"prefill": 1, "decode": 1}


def test_as_long_as_nobody_knows_how_long_prompts_take_only_misses_bring_workers() -> None:
    autoscaler, situation = Autoscaler(RULES), Situation()
    look = situation.look(40, 4)
    unknown = replace(look, arrivals=tuple(replace(each, prefill_s=()) for each in look.arrivals))
    assert {autoscaler.decide(unknown).want["prefill"] for _ in range(30)} == {1}


def test_what_is_turned_away_while_decode_workers_are_full_makes_no_prefill_workers() -> None:
    situation = Situation(sizes={"prefill": 3, "decode": 1})
    situation.live(RULES.hold_s, 5)
    before = situation.sizes["prefill"]
    for _ in range(40):
        look = replace(situation.look(5, 20, Measured(20, 20, 0, 20, 0)), waiting_for_decode=30)
        situation.sizes = dict(situation.autoscaler.decide(look).want)
    assert situation.sizes["prefill"] <= before
    assert situation.sizes["decode"] > 2


# ------------------------------------------------------------------------------------------------ shrinking


def test_a_pool_shrinks_as_far_as_the_smaller_one_was_enough_over_the_hold_time() -> None:
    situation = Situation()
    situation.live(2 * RULES.hold_s, 30, 60)
    full = dict(situation.sizes)
    situation.live(RULES.hold_s / 10, 5, 4)
    assert situation.sizes == full
    situation.live(RULES.hold_s / 3, 5, 4)
    assert situation.sizes["prefill"] >= 5
    situation.live(RULES.hold_s, 5, 4)
    assert situation.sizes["prefill"] <= 2
    assert situation.sizes["decode"] == 1


def test_a_worker_that_is_ordered_is_not_ordered_twice() -> None:
    situation = Situation()
    situation.live(RULES.hold_s, 30)
    look = situation.look(30, 4, coming=1)
    assert dict(situation.autoscaler.decide(look).want) == situation.sizes


# ------------------------------------------------------------------------------------------- what cannot be helped


def test_prompts_that_alone_take_too_long_are_named_and_grow_nothing() -> None:
    situation = Situation(prompt_s=6.0, target_s=3.0)
    decisions = situation.live(3 * RULES.hold_s, 5, measured=Measured(0, 0, 5, 5, 0))
    assert 6 <= situation.sizes["prefill"] <= 7, "as many as compute what comes, and no more for the target's sake"
    assert "100 % of prompts alone take longer than their target" in decisions[-1].warnings[0]


def test_steps_that_alone_take_too_long_are_named() -> None:
    situation = Situation(step_s=0.15)
    decisions = situation.live(RULES.hold_s, 5, 3)
    assert "a decode step takes 151 ms for one request, the target is 100 ms" in decisions[-1].warnings[0]
    assert situation.sizes["decode"] <= 3


def test_a_pool_at_its_maximum_says_what_it_lacks() -> None:
    rules = replace(RULES, bounds={"prefill": Bounds(1, 3), "decode": Bounds(1, 40)})
    situation = Situation(rules)
    decisions = situation.live(RULES.hold_s, 40)
    assert situation.sizes["prefill"] == 3
    assert decisions[-1].warnings == ("the prefill pool needs 4 workers and may have 3",)


# -------------------------------------------------------------------------------------------- between the pools


def test_workers_that_one_pool_can_spare_change_to_the_other_and_back() -> None:
    rules = replace(RULES, devices=6)
    situation = Situation(rules, {"prefill": 5, "decode": 1})
    situation.live(RULES.hold_s, 18)
    assert situation.sizes == {"prefill": 5, "decode": 1}
    there = situation.live(RULES.hold_s + RULES.window_s, 5, 45)
    assert sum(decision.convert for decision in there) >= 2
    assert situation.sizes["decode"] == 3
    assert sum(situation.sizes.values()) <= 6
    back = situation.live(2 * RULES.hold_s, 18, 4)
    assert sum(decision.convert for decision in back) < 0
    assert situation.sizes["prefill"] >= 4


def test_a_lack_of_devices_is_said_and_whoever_has_them_keeps_them() -> None:
    situation = Situation(replace(RULES, devices=5), {"prefill": 4, "decode": 1})
    situation.live(RULES.hold_s, 16)
    decisions = situation.live(RULES.window_s, 16, 60)
    assert situation.sizes == {"prefill": 4, "decode": 1}
    assert "the decode pool needs 4 workers, and there is no room for 3 of them" in decisions[-1].warnings[-1]


def test_where_pools_are_of_different_ranks_nobody_changes() -> None:
    situation = Situation(replace(RULES, convertible=False, devices=6), {"prefill": 5, "decode": 1})
    situation.live(RULES.hold_s, 18)
    assert all(decision.convert == 0 for decision in situation.live(2 * RULES.hold_s, 5, 50))
    assert situation.sizes["decode"] == 3, "as soon as one pool has shrunk the other may grow"


# ------------------------------------------------------------------------------------------------------- parts


def test_the_cost_of_a_batch_is_a_line_that_is_learned() -> None:
    costs = BatchCosts()
    for running in (2, 9, 4, 16, 7, 12):
        costs.observe([Batch(running, running, 0.02 + 0.001 * running, 1, 100, 64)])
    assert abs(costs.most_at_once(0.05) - (0.045 - 0.02) / 0.001) < 1
    assert costs.most_at_once(10.0) == 32, "no more than twice what was seen"


def test_a_short_span_proves_a_jump_and_a_long_one_a_small_change() -> None:
    load = Load(300)
    for _ in range(60):
        load.add(5, 10, 10)
    assert 1.4 < load.of_late(60) < 2.0 < load.at_most < 2.2
    for _ in range(3):
        load.add(5, 40, 40)
    assert load.of_late(60) > 3
    assert load.at_least < 3


def test_the_fewest_workers_are_one_more_than_allowed_if_none_are_enough() -> None:
    assert prefill_workers(9.0, [1.0], 4.0, 0.96, 5, gives_way=True) == 6
    assert prefill_workers(0.0, [1.0], 4.0, 0.96, 5, gives_way=True) == 0


def test_classes_that_want_the_same_or_only_the_first_token_as_soon_are_all_counted() -> None:
    def wanted(*shares: tuple[int, float]) -> int:
        situation = Situation()
        for _ in range(30):
            look = situation.look(0, 4)
            arrivals = tuple(Arrivals(4.0, itl_s, True, count, (1.0,) * count) for count, itl_s in shares)
            situation.sizes = dict(situation.autoscaler.decide(replace(look, arrivals=arrivals)).want)
        return situation.sizes["prefill"]

    alone = wanted((20, 0.1))
    assert alone > wanted((10, 0.1))
    assert wanted((10, 0.1), (10, 0.1)) == alone
    assert wanted((10, 0.1), (10, 0.2)) >= alone
    assert wanted((10, 0.2), (10, 0.1)) >= alone
