from dataclasses import replace

import pytest

from lab.planner.capacity import Workload, colocated_capacity, decode_capacity, prefill_capacity, rate_within
from lab.planner.gpus import GPUS
from lab.planner.models import MODELS
from lab.planner.plan import Asked, NothingFits, fewest_gpus, make_plan
from lab.planner.steps import EXPECTED, Steps, transfer_s

LLAMA_8B, LLAMA_70B, H100 = MODELS["llama-3.1-8b"], MODELS["llama-3.1-70b"], GPUS["h100"]
SUMMARY = Workload(8000, 300, ttft_s=2, itl_s=0.05)


def test_the_known_hand_calculations_come_out() -> None:
    one = Steps(LLAMA_8B, H100, 1)
    assert one.step_s(1, 0) == pytest.approx(4.8e-3, rel=0.005)  # 16.06 GB at 3.35 TB/s
    assert one.kv_bytes_per_token == 128 * 1024
    assert Steps(LLAMA_70B, H100, 1).kv_bytes_per_token == 320 * 1024
    # 2 x 7.5 billion x 1,000 FLOP at 989 TFLOP/s, and little attention.
    assert one.prefill_s(1000) == pytest.approx(15.2e-3, rel=0.03)
    # A prompt of 8k tokens of a 70B model is 2.5 GiB; four ranks at 450 GB/s each.
    four = Steps(LLAMA_70B, H100, 4)
    assert transfer_s(four, four, 8192, same_machine=True) == pytest.approx(2.5 * 2**30 / 1.8e12)


def test_weights_that_do_not_fit_leave_no_tokens() -> None:
    assert Steps(LLAMA_70B, H100, 1).kv_tokens == Steps(LLAMA_70B, H100, 2).kv_tokens == 0
    assert Steps(LLAMA_70B, H100, 4).kv_tokens == pytest.approx((72e9 - 3e9 - 70.55e9 / 2) / (80 * 1024), rel=0.01)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_no_expectation_beats_its_bound(tensor_parallel: int) -> None:
    bound = Steps(LLAMA_8B, H100, tensor_parallel)
    expected = replace(bound, efficiency=EXPECTED)
    for tokens in (1, 100, 5000):
        assert expected.prefill_s(tokens) > bound.prefill_s(tokens)
        assert expected.step_s(tokens, 100) > bound.step_s(tokens, 100)


def test_steps_grow_with_everything_they_do() -> None:
    steps = Steps(LLAMA_8B, H100, 2, efficiency=EXPECTED)
    assert steps.step_s(8, 1000) < steps.step_s(8, 2000) < steps.step_s(16, 2000) < steps.step_s(16, 2000, 512)


def test_a_queue_takes_less_the_closer_a_prompt_is_to_its_limit() -> None:
    rates = [rate_within(0.5, limit_s, 0.9) for limit_s in (0.4, 0.5, 0.8, 2.0, 20.0)]
    assert rates[0] == 0
    assert rates[1] == pytest.approx(0.1 / 0.5, rel=0.01)  # only those that find nobody there
    assert rates == sorted(rates)
    assert rates[-1] <= 1 / 0.5


def test_limits_bind_and_the_reason_is_said() -> None:
    steps = Steps(LLAMA_70B, H100, 4, efficiency=EXPECTED)
    assert "TTFT" in prefill_capacity(steps, replace(SUMMARY, ttft_s=0.1)).why_not
    assert "ITL" in decode_capacity(steps, replace(SUMMARY, itl_s=0.005)).why_not
    assert "ITL" in colocated_capacity(steps, replace(SUMMARY, itl_s=0.005)).why_not
    decode = decode_capacity(steps, SUMMARY)
    assert decode.step_s <= SUMMARY.itl_s
    assert decode.sequences * (SUMMARY.prompt_tokens + SUMMARY.output_tokens) <= steps.kv_tokens
    assert "room" in decode_capacity(Steps(LLAMA_70B, H100, 2), SUMMARY).why_not


def test_a_plan_uses_no_more_gpus_than_there_are_and_both_pools() -> None:
    plan = make_plan(Asked(LLAMA_70B, H100, 16, SUMMARY))
    assert plan.num_prefill * plan.prefill_tp + plan.num_decode * plan.decode_tp <= 16
    assert plan.rate_per_s > 0
    assert plan.ratio is not None
    assert plan.ratio > 1.05
    assert plan.verdict.startswith("Separate")


def test_it_says_when_separating_does_not_pay() -> None:
    loose = Workload(1200, 250, ttft_s=10, itl_s=0.5)
    plan = make_plan(Asked(LLAMA_8B, H100, 2, loose))
    assert plan.verdict.startswith("Do not separate")
    assert plan.colocated_usd_per_million_tokens is not None
    assert plan.usd_per_million_tokens is not None
    assert plan.colocated_usd_per_million_tokens < plan.usd_per_million_tokens


def test_one_gpu_cannot_be_two_pools() -> None:
    plan = make_plan(Asked(LLAMA_8B, H100, 1, replace(SUMMARY, prompt_tokens=1000)))
    assert plan.rate_per_s == 0
    assert "too few" in plan.verdict


def test_a_rate_finds_its_number_of_gpus() -> None:
    plan = fewest_gpus(Asked(LLAMA_70B, H100, 0, SUMMARY), rate_per_s=3)
    assert plan is not None
    assert plan.rate_per_s >= 3
    less = make_plan(replace(plan.asked, num_gpus=plan.asked.num_gpus - 1))
    assert less.rate_per_s < 3


def test_a_model_without_room_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(NothingFits, match=r"141 GB of weights per GPU leave no room in 48 GB"):
        make_plan(Asked(LLAMA_70B, GPUS["l40s"], 1, SUMMARY))
