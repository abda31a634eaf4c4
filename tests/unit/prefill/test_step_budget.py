"""How many prompt tokens fit into a step beside decodes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.step_budget import (
    CPU_PRIOR,
    GPU_PRIOR,
    ITL_MARGIN,
    MIN_PREFILL_TOKENS,
    StepCost,
    StepCosts,
    economical_tokens,
    prefill_budget,
)

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
