import random
import statistics

import pytest

from lab.load.client import Record
from lab.load.summary import summarize
from lab.load.work import parse_work

WORK = parse_work("chat=1/s,10+5,ttft=1,itl=0.1")


def record(ttft_s: float = 0.5, gaps_s: list[float] | None = None, **changes: object) -> Record:
    gaps = [0.05] * 4 if gaps_s is None else gaps_s
    made = Record("chat", 0, 0, 10, 5, 0.0, 0.0, ttft_s, gaps, ttft_s + sum(gaps), 5, 200)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_good_is_whole_and_within_both_limits_of_all_that_were_offered() -> None:
    records = [
        record(),
        record(ttft_s=1.5),
        record(gaps_s=[0.05, 0.05, 0.5, 0.05]),
        record(error="3 tokens of 5", tokens=3),
        record(status=503, error="503: full", ttft_s=0.0, gaps_s=[], tokens=0),
    ]
    (chat,) = summarize([WORK], records, seconds=10).classes
    assert (chat.offered, chat.whole, chat.rejected, chat.good) == (5, 3, 1, 1)
    assert (chat.met_ttft, chat.met_itl) == (2, 2)
    assert chat.attained == pytest.approx(0.2)
    assert chat.tokens_per_s == pytest.approx(1.5)


def test_events_of_several_tokens_do_not_make_tokens_slower() -> None:
    (chat,) = summarize([WORK], [record(gaps_s=[0.1, 0.1])], seconds=1).classes
    assert chat.time_per_token_s.p50 == pytest.approx(0.05)


def test_every_gap_counts_and_failed_requests_do_not() -> None:
    records = [record(gaps_s=[0.1, 0.2]), record(gaps_s=[0.3]), record(gaps_s=[9.0], error="cut off")]
    total = summarize([WORK], records, seconds=1).total
    assert total.itl_s.p50 == pytest.approx(0.2)
    assert total.itl_s.max == pytest.approx(0.3)
    assert total.second_gap_s.p50 == pytest.approx(0.2)


def test_percentiles_are_those_of_an_independent_computation() -> None:
    rng = random.Random(3)
    records = [record(ttft_s=rng.expovariate(2), gaps_s=[rng.random() / 5 for _ in range(9)]) for _ in range(57)]
    (chat,) = summarize([WORK], records, seconds=1).classes
    for spread, samples in (
        (chat.ttft_s, [r.ttft_s or 0.0 for r in records]),
        (chat.itl_s, [gap for r in records for gap in r.gaps_s]),
    ):
        hundredths = statistics.quantiles(samples, n=100, method="inclusive")
        found = (spread.p50, spread.p90, spread.p99, spread.max)
        assert found == pytest.approx((hundredths[49], hundredths[89], hundredths[98], max(samples)))
    slowest = [statistics.quantiles(r.gaps_s, n=100, method="inclusive")[98] for r in records]
    good = sum((r.ttft_s or 0.0) <= 1 and gap <= 0.1 for r, gap in zip(records, slowest, strict=True))
    assert chat.good == good


def test_without_limits_there_is_no_goodput() -> None:
    (plain,) = summarize([parse_work("chat=1/s,10+5")], [record()], seconds=1).classes
    assert plain.good is None
    assert plain.attained is None


def test_errors_are_counted_by_kind_and_lateness_is_the_generators_own() -> None:
    records = [record(status=503, error="503: a"), record(status=503, error="503: b"), record(sent_s=0.25)]
    summary = summarize([WORK], records, seconds=1)
    assert summary.errors == {"503": 2}
    assert summary.late_s.max == pytest.approx(0.25)
