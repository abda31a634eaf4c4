"""What a load came to, and what is wrong with it."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cluster.config import SimulationConfig
from lab.load.client import Record
from lab.load.work import WorkClass
from lab.overload import Outcome, capacity_per_s, complaints, outcome_of

WORK = WorkClass("load", 1.0, 2000, 4, ttft_s=1.0, itl_s=0.1)
FINE = Outcome(1.0, 20, 18, 0, 0, 2, 0, 0.05, 1.8, 5, 0, 700.0)


def record(**changes: Any) -> Record:
    made = Record(work="load", session=0, turn=0, prompt_tokens=1, output_tokens=4, planned_s=0.0, sent_s=0.0)
    return msgspec.structs.replace(made, **changes)


def test_only_what_came_in_time_is_good_and_a_refusal_says_when_to_come_back() -> None:
    records = [
        record(status=200, ttft_s=0.5, gaps_s=[0.01]),
        record(status=200, ttft_s=1.5),
        record(status=503, error="503", end_to_end_s=0.02, retry_after_s=2.0),
        record(status=429, error="429", end_to_end_s=0.04),
    ]
    outcome = outcome_of(2.0, WORK, records, 10.0, [3, 7, 0], 700.0)
    assert (outcome.offered, outcome.good, outcome.refused, outcome.untold) == (4, 1, 2, 1)
    assert (outcome.late, outcome.uneven) == (1, 0)
    assert outcome.goodput_per_s == pytest.approx(0.1)
    assert (outcome.longest_queue, outcome.left_in_queue) == (7, 0)


def test_a_cluster_that_bears_its_load_gives_no_reason_to_complain() -> None:
    assert complaints([FINE, replace(FINE, goodput_per_s=1.7, refused_p99_s=None)]) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"goodput_per_s": 1.5}, "goodput fell from 1.80/s to 1.50/s"),
        ({"untold": 1}, "Retry-After"),
        ({"refused_p99_s": 0.2}, "refusals took 200 ms"),
        ({"left_in_queue": 3}, "stayed in the queue"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(changes: dict[str, Any], complaint: str) -> None:
    (found,) = complaints([FINE, replace(FINE, **changes)])
    assert complaint in found


def test_capacity_is_what_the_prefill_workers_compute() -> None:
    costs = SimulationConfig(
        chunk_s=0.01, prefill_tokens_per_s=1000, attention_s_per_pair=0, max_num_batched_tokens=1000
    )
    assert capacity_per_s(costs, 2, 2000) == pytest.approx(2 / 2.02)
