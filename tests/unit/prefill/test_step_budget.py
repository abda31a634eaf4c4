"""How many prompt tokens fit into a step beside decodes."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.step_budget import (
    ITL_MARGIN,
    MIN_PREFILL_TOKENS,
    economical_tokens,
    fill_tokens,
    prefill_budget,
    yielding_budget,
)
from prefill.step_cost import CPU_PRIOR, GPU_PRIOR, StepCost, StepCosts, pairs_of

COSTS = [
    StepCost(fixed_s=0.03, prefill_token_s=0.0011, decode_token_s=0.002),
    StepCost(fixed_s=0.008, prefill_token_s=2e-5, decode_token_s=2e-5),
]


def learned(truth: StepCost, prior: StepCost, seed: int = 0, hiccups: float = 0.1) -> StepCosts:
    """From 400 steps of which each is up to 5 % longer or shorter, and some are ten times as long."""
    dice, costs = random.Random(seed), StepCosts(prior)
    for _ in range(400):
        prefill, decode = dice.choice([(0, 1), (0, 7), (64, 3), (100, 0), (512, 0), (512, 0), (300, 12)])
        slower = 10.0 if dice.random() < hiccups else 1.0
        costs.observe(prefill, decode, truth.seconds(prefill, decode) * dice.uniform(0.95, 1.05) * slower)
    return costs


@pytest.mark.parametrize("truth", COSTS, ids=["cpu", "gpu"])
@pytest.mark.parametrize("prior", [CPU_PRIOR, GPU_PRIOR], ids=["cpu prior", "gpu prior"])
def test_the_costs_of_steps_are_learned_despite_hiccups_and_a_wrong_prior(truth: StepCost, prior: StepCost) -> None:
    cost = learned(truth, prior).cost
    for prefill, decode in [(0, 1), (0, 7), (200, 3), (512, 0)]:
        assert cost.seconds(prefill, decode) == pytest.approx(truth.seconds(prefill, decode), rel=0.2)


@pytest.mark.parametrize("prior", [CPU_PRIOR, GPU_PRIOR], ids=["cpu prior", "gpu prior"])
def test_what_attention_to_earlier_tokens_costs_is_told_from_what_every_step_and_token_cost(prior: StepCost) -> None:
    truth, dice = StepCost(0.02, 0.0012, 0.002, pair_s=1e-6), random.Random(2)
    costs = StepCosts(prior)
    for _ in range(400):
        tokens, before = dice.choice([(512, 0), (512, 512), (476, 1024), (128, 0), (60, 0), (285, 1200)])
        pairs = pairs_of(tokens, before)
        costs.observe(tokens, 0, truth.seconds(tokens, 0, pairs) * dice.uniform(0.95, 1.05), pairs)
        costs.observe(0, 3, truth.seconds(0, 3))
    assert costs.cost.fixed_s == pytest.approx(truth.fixed_s, abs=0.015)
    for tokens, before in [(128, 0), (512, 2000), (285, 600)]:
        pairs = pairs_of(tokens, before)
        assert costs.cost.seconds(tokens, 0, pairs) == pytest.approx(truth.seconds(tokens, 0, pairs), rel=0.15)


@given(st.integers(1, 4096), st.integers(0, 100_000), st.floats(0, 1e-5))
def test_as_many_tokens_as_fit_into_a_time_take_that_time(tokens: int, before: int, pair_s: float) -> None:
    cost = StepCost(0.02, 0.001, 0.002, pair_s)
    seconds = cost.prompt_s(tokens, pairs_of(tokens, before))
    assert cost.tokens_within(seconds * 1.000001, before) in (tokens, tokens + 1)
    assert cost.tokens_within(0.0, before) == 0


def test_late_chunks_of_a_long_prompt_are_shorter() -> None:
    cost = StepCost(0.02, 0.001, 0.002, pair_s=1e-6)
    early, late = (prefill_budget(cost, 2, 0.1, 2048, before) for before in (0, 2000))
    assert early > 2 * late > 2 * MIN_PREFILL_TOKENS
    early, late = (yielding_budget(cost, 0.5, 2048, before) for before in (0, 1000))
    assert early > 1.5 * late


def test_a_change_of_speed_is_noticed_within_some_dozens_of_steps() -> None:
    costs = learned(COSTS[0], CPU_PRIOR)
    for _ in range(24):
        costs.observe(0, 4, 2 * COSTS[0].seconds(0, 4))
        costs.observe(64, 4, 2 * COSTS[0].seconds(64, 4))
    assert costs.cost.seconds(64, 4) > 1.5 * COSTS[0].seconds(64, 4)


def test_one_hiccup_of_a_size_not_seen_before_changes_nothing() -> None:
    costs = learned(COSTS[0], CPU_PRIOR, hiccups=0.0)
    before = costs.cost
    costs.observe(40, 40, 30.0)
    for _ in range(8):
        costs.observe(0, 1, COSTS[0].seconds(0, 1))
    assert costs.cost.seconds(64, 3) == pytest.approx(before.seconds(64, 3), rel=0.1)


def test_steps_of_one_size_alone_give_its_duration_and_no_nonsense() -> None:
    costs = StepCosts(CPU_PRIOR)
    for _ in range(20):
        costs.observe(512, 0, 0.9)
    assert costs.cost.seconds(512, 0) == pytest.approx(0.9, rel=0.02)
    assert 0.0 <= costs.cost.fixed_s < 0.45


@pytest.mark.parametrize("truth", COSTS, ids=["cpu", "gpu"])
def test_a_step_with_decodes_fits_into_the_target(truth: StepCost) -> None:
    tokens = prefill_budget(truth, 4, itl_s=0.1, full_tokens=1_000_000)
    assert tokens > MIN_PREFILL_TOKENS
    assert ITL_MARGIN * 0.1 * 0.9 < truth.seconds(tokens, 4) <= ITL_MARGIN * 0.1


def test_steps_beside_decodes_are_shorter_where_they_often_take_longer_than_usual() -> None:
    truth, dice = COSTS[0], random.Random(1)
    steady, unsteady = StepCosts(CPU_PRIOR), StepCosts(CPU_PRIOR)
    for number in range(400):
        tokens = dice.choice([16, 48])
        for costs, slower in ((steady, 1.0), (unsteady, 1.3 if number % 8 == 0 else 1.0)):
            costs.observe(tokens, 4, truth.seconds(tokens, 4) * slower)
            costs.observe(0, 4, truth.seconds(0, 4))
    assert steady.overrun == pytest.approx(1.0, abs=0.01)
    assert unsteady.overrun == pytest.approx(1.3, rel=0.05)
    tokens = prefill_budget(unsteady.cost, 4, 0.1, 512, overrun=unsteady.overrun)
    assert MIN_PREFILL_TOKENS < tokens < prefill_budget(steady.cost, 4, 0.1, 512, overrun=steady.overrun)
    assert 1.3 * truth.seconds(tokens, 4) <= 0.1


def test_a_wrong_prior_and_a_stalled_machine_do_not_count_as_overruns_for_long() -> None:
    costs = StepCosts(GPU_PRIOR)
    for _ in range(8):
        costs.observe(48, 4, COSTS[0].seconds(48, 4))
    assert costs.overrun == pytest.approx(1.0, abs=0.01)
    for _ in range(64):
        costs.observe(48, 4, 30.0)
        costs.observe(48, 4, COSTS[0].seconds(48, 4))
    assert costs.overrun <= 1.5


def test_others_fill_a_step_up_until_it_is_economical_or_would_hold_up_the_first_too_long() -> None:
    cost = COSTS[0]
    assert fill_tokens(cost, 100, inf, 2048) == economical_tokens(cost, 2048) == 245
    assert fill_tokens(cost, 100, 0.11, 2048) == 200
    assert fill_tokens(cost, 100, 0.0, 2048) == 100
    assert fill_tokens(cost, 100, inf, 64) == 64


def test_steps_that_yield_end_in_time_but_stay_economical() -> None:
    cost = COSTS[0]
    tokens = yielding_budget(cost, 0.5, 2048)
    assert 0.49 < cost.seconds(tokens, 0) <= 0.5
    least = yielding_budget(cost, 0.01, 2048)
    assert MIN_PREFILL_TOKENS < least < economical_tokens(cost, 2048)
    assert cost.fixed_s / cost.seconds(least, 0) == pytest.approx(0.25, rel=0.05)
    assert yielding_budget(cost, 0.5, 64) == 64
    assert yielding_budget(cost, inf, 2048) == 2048


def test_without_decodes_a_step_may_hold_everything() -> None:
    assert prefill_budget(COSTS[0], 0, itl_s=0.001, full_tokens=512) == 512


def test_a_prompt_goes_on_even_where_decodes_alone_miss_the_target() -> None:
    assert prefill_budget(COSTS[0], 100, itl_s=0.1, full_tokens=512) == MIN_PREFILL_TOKENS
    assert prefill_budget(COSTS[0], 100, itl_s=0.1, full_tokens=7) == 7


def test_small_steps_are_economical_where_they_cost_little_by_themselves() -> None:
    assert economical_tokens(COSTS[0], 512) == 245
    assert economical_tokens(COSTS[1], 2048) == 2048


def test_absurdly_short_steps_do_not_end_the_engine() -> None:
    costs = StepCosts(CPU_PRIOR)
    for _ in range(20):
        costs.observe(8192, 0, 1e-9)
    assert costs.cost.prefill_token_s > 0


observed = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 512), st.floats(1e-4, 100)), max_size=40)


@given(observed, st.integers(1, 512), st.floats(0.001, 10))
def test_whatever_was_observed_the_budget_is_within_bounds(
    steps: list[tuple[int, int, float]], decode_tokens: int, itl_s: float
) -> None:
    costs = StepCosts(GPU_PRIOR)
    for step in steps:
        costs.observe(*step)
    cost = costs.cost
    assert min(cost.fixed_s, cost.decode_token_s) >= 0
    assert cost.prefill_token_s > 0
    assert MIN_PREFILL_TOKENS <= prefill_budget(cost, decode_tokens, itl_s, 2048) <= 2048
