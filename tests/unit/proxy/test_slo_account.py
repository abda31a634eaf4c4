"""Whether a request got what its class promises, and the histogram of all gaps."""

import time

import pytest
from prometheus_client import CollectorRegistry

from proxy.scheduling.slo import PROBE, SloClass, Standing
from proxy.slo.account import Account, Outcome
from proxy.slo.metrics import GapCounts, SloMetrics
from proxy.slo.party import Party

GOLD = SloClass("gold", ttft_s=1.0, itl_s=0.1)


def account(*gaps_s: float, ttft_s: float = 0.5) -> Account:
    made = Account(GOLD, GapCounts(), ttft_s=ttft_s)
    now_s = 100.0
    made.output(now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        made.output(now_s)
    return made


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (account(), "attained"),
        (account(0.09, 0.05), "attained"),
        (account(ttft_s=1.1), "missed_ttft"),
        (account(0.05, 0.2), "missed_itl"),
        (account(0.2, ttft_s=1.1), "missed_both"),
        (account(*[0.01] * 99, 0.2), "attained"),
        (account(*[0.01] * 98, 0.2), "missed_itl"),
        (account(*[0.01] * 198, 0.2, 0.2), "attained"),
        (account(*[0.01] * 197, 0.2, 0.2, 0.2), "missed_itl"),
    ],
    ids=["one token", "even", "late", "uneven", "both", "1 of 100", "1 of 99", "2 of 200", "3 of 200"],
)
def test_one_gap_of_a_hundred_may_be_longer(made: Account, outcome: str) -> None:
    made.answered()
    assert made.outcome == outcome


def test_waiting_for_more_input_is_no_gap() -> None:
    made = account(0.01)
    made.pause()
    made.output(500.0)
    made.output(500.05)
    assert (made.num_gaps, made.num_long) == (2, 0)


def test_the_first_word_about_the_end_counts() -> None:
    made = account()
    made.settle("failed")
    made.answered()
    assert made.outcome == "failed"


def test_every_gap_is_in_the_histogram_and_every_request_counted_once() -> None:
    registry = CollectorRegistry()
    metrics = SloMetrics(registry)
    for outcome in ("answered", "given up", "rejected"):
        opened = metrics.open(Standing(GOLD))
        for at_s in (1.0, 1.02, 1.5):
            opened.output(at_s)
        if outcome == "answered":
            opened.answered()
        elif outcome == "rejected":
            metrics.rejected(opened, "overload")
        metrics.close(opened)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"twinpool_{name}", {"slo_class": "gold", **labels})

    assert value("itl_seconds_count") == 6
    assert value("itl_seconds_sum") == pytest.approx(1.5)
    assert value("itl_seconds_bucket", le="0.01") == 0
    assert value("itl_seconds_bucket", le="0.03") == 3
    assert value("itl_seconds_bucket", le="0.5") == 6
    assert value("itl_seconds_bucket", le="+Inf") == 6
    assert value("slo_requests_total", outcome="missed_itl") == 1
    assert value("slo_requests_total", outcome="aborted") == 1
    assert value("slo_requests_total", outcome="rejected") == 1
    assert value("requests_rejected_total", reason="overload") == 1
    metrics.unregister()
    assert list(registry.collect()) == []


@pytest.mark.parametrize(
    ("outcomes", "together"),
    [
        (("attained", "attained"), "attained"),
        (("missed_ttft", "attained"), "missed_ttft"),
        (("missed_itl", "missed_ttft"), "missed_both"),
        (("attained", "failed", "failed"), "failed"),
        (("rejected",), "rejected"),
        (("attained", "aborted"), "aborted"),
    ],
)
def test_choices_count_as_one_by_the_worst_of_them(outcomes: tuple[Outcome, ...], together: Outcome) -> None:
    party = Party(max(2, len(outcomes)))
    told = [said for outcome in outcomes if (said := party.ended(outcome)) is not None]
    assert told == [together]


def test_the_proxys_own_requests_are_not_counted() -> None:
    registry = CollectorRegistry()
    metrics = SloMetrics(registry)
    opened = metrics.open(Standing(PROBE))
    opened.output(1.0)
    opened.output(2.0)
    metrics.rejected(opened, "overload")
    metrics.close(opened)
    assert not metrics.outcomes
    assert [sample for family in registry.collect() for sample in family.samples] == []


def test_a_gap_costs_no_more_than_a_few_hundred_nanoseconds() -> None:
    made = account()
    start_s = time.process_time()
    for index in range(20_000):
        made.output(index * 0.03)
    assert (time.process_time() - start_s) / 20_000 < 5e-6, "an order of magnitude above what it takes"
