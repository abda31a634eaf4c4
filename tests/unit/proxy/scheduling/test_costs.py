"""The cost model learns what a worker does, in any order of prompts, and forgets no stall's worth."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.scheduling.capacity.costs import CostModel, OutputLengths, Work, prefill_work


def test_the_work_of_several_prompts_takes_as_long_as_the_prompts() -> None:
    costs = CostModel(1000.0, 0.04)
    prompts = [(500, 0), (1500, 200), (10, 4000)]
    total = sum((prefill_work(*prompt) for prompt in prompts), Work())
    assert costs.seconds(total) == pytest.approx(sum(costs.prefill_s(*prompt) for prompt in prompts))


@pytest.mark.parametrize("speed", [100.0, 5000.0])
def test_a_worker_is_known_after_a_few_dozen_prompts(speed: float) -> None:
    truth, learned = CostModel(speed, 0.1), CostModel(1000.0, 0.04)
    draw = random.Random(1)
    for _ in range(60):
        work = prefill_work(draw.randrange(50, 4000)) + prefill_work(draw.randrange(50, 400))
        learned.observe_prefill(work, truth.seconds(work) * draw.uniform(0.9, 1.1))
    for tokens in (200, 1000, 4000):
        assert learned.prefill_s(tokens) == pytest.approx(truth.prefill_s(tokens), rel=0.35)


def test_one_stall_is_no_new_speed() -> None:
    costs = CostModel(1000.0, 0.04)
    for _ in range(20):
        costs.observe_prefill(prefill_work(1000), costs.prefill_s(1000))
    before_s = costs.prefill_s(1000)
    costs.observe_prefill(prefill_work(1000), 60.0)
    costs.observe_step(60.0)
    assert costs.prefill_s(1000) < before_s * 1.2
    assert costs.step_s < 0.05


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0.0, 1000.0)), max_size=50))
def test_whatever_is_observed_work_takes_time(samples: list[tuple[int, float]]) -> None:
    costs = CostModel(1000.0, 0.04)
    for tokens, seconds in samples:
        costs.observe_prefill(prefill_work(tokens), seconds)
        assert 0.0 < costs.prefill_s(100) < costs.prefill_s(10_000) < float("inf")


def test_answers_are_expected_to_be_as_long_as_nine_of_ten_were_and_at_least_512_tokens() -> None:
    lengths = OutputLengths()
    assert lengths.expected(10_000) == 512
    assert lengths.expected(16) == 16
    for length in range(1, 1001):
        lengths.observe(length * 2)
    # The last 256: 1490 to 2000.
    assert lengths.expected(10_000) == pytest.approx(1950, abs=4)
    for _ in range(256):
        lengths.observe(5)
    assert lengths.expected(10_000) == 512
