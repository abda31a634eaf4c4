"""What one API key may ask for in a minute."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.configuration.security import RateLimitsConfig
from cluster.preflight.config_file import load_config
from cluster.preflight.problems import ConfigError
from proxy.flights.events import Cause
from proxy.slo.rate_limits import NOTHING, RateLimits, Reservation, wait_s
from proxy.slo.rules import tenant_of

START_S = 60_000_000.0
"""The beginning of a minute."""


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


Limited = list[tuple[str, str]]


def limits(checked: bool = True, **config: Any) -> tuple[RateLimits, Limited]:
    limited: Limited = []
    return RateLimits(RateLimitsConfig(**config), checked, lambda *what: limited.append(what)), limited


def taken(take: Callable[..., Reservation | Cause], *request: Any) -> Reservation:
    reserved = take(*request)
    assert isinstance(reserved, Reservation), reserved
    return reserved


def refused(take: Callable[..., Reservation | Cause], *request: Any) -> Cause:
    cause = take(*request)
    assert isinstance(cause, Cause), cause
    return cause


def test_without_limits_everything_is_taken() -> None:
    free, _ = limits()
    assert free.take("a", 1_000_000, 1_000_000) is NOTHING
    free.settle(NOTHING, 5)


def test_requests_are_limited_for_each_key(clock: Clock) -> None:
    limited, told = limits(requests_per_minute=3)
    for _ in range(3):
        taken(limited.take, "a", 1, 1)
    cause = refused(limited.take, "a", 1, 1)
    assert cause.kind == "rate_limited"
    assert "limit of 3 requests per minute" in cause.message
    assert told == [("default", "requests")]
    taken(limited.take, "b", 1, 1)


def test_who_waits_as_long_as_told_is_taken_and_not_much_earlier(clock: Clock) -> None:
    limited, _ = limits(requests_per_minute=3, tokens_per_minute=1000)
    clock.now_s += 30
    for _ in range(3):
        taken(limited.take, "a", 100, 200)
    for request in ((1, 1), (100, 200), (800, 100)):
        cause = refused(limited.take, "a", *request)
        assert cause.retry_after_s is not None
        assert 0 < cause.retry_after_s <= 90
        clock.now_s += cause.retry_after_s - 1
        refused(limited.take, "a", *request)
        clock.now_s += 1.01
        taken(limited.take, "a", *request)


def test_tokens_are_reserved_and_given_back(clock: Clock) -> None:
    limited, told = limits(tokens_per_minute=1000)
    reserved = taken(limited.take, "a", 100, 700)
    assert "1000 tokens per minute" in refused(limited.take, "a", 100, 200).message
    assert told == [("default", "tokens")]
    limited.settle(reserved, 50)
    taken(limited.take, "a", 100, 750)
    refused(limited.take, "a", 1, 1)


def test_several_choices_share_one_prompt(clock: Clock) -> None:
    limited, _ = limits(tokens_per_minute=1000)
    first = taken(limited.take, "a", 100, 200, 3)
    assert (first.tokens, first.prompt_tokens) == (300, 100)
    refused(limited.take, "a", 1, 301)
    for reserved in (first, first.for_sibling(), first.for_sibling()):
        limited.settle(reserved, 10)
    taken(limited.take, "a", 100, 770)  # 130 were used
    refused(limited.take, "a", 1, 1)


def test_choices_that_ask_for_more_than_the_limit_count_what_they_used_whichever_ends_first(clock: Clock) -> None:
    limited, _ = limits(tokens_per_minute=1000)
    first = taken(limited.take, "a", 100, 1000, 4)
    for reserved in (*[first.for_sibling()] * 3, first):
        limited.settle(reserved, 50)
    refused(limited.take, "a", 100, 601)  # 300 were used
    taken(limited.take, "a", 100, 600)


def test_more_than_the_limit_is_taken_when_nothing_else_counts_and_then_counts_in_full(clock: Clock) -> None:
    limited, _ = limits(tokens_per_minute=1000)
    reserved = taken(limited.take, "a", 5000, 100)
    refused(limited.take, "a", 1, 1)
    limited.settle(reserved, 100)
    clock.now_s += 61
    refused(limited.take, "a", 1, 1)
    clock.now_s += 55
    taken(limited.take, "a", 1, 1)


def test_what_was_reserved_long_ago_is_not_given_back(clock: Clock) -> None:
    limited, _ = limits(tokens_per_minute=1000)
    reserved = taken(limited.take, "a", 100, 900)
    clock.now_s += 600
    taken(limited.take, "a", 500, 500)
    limited.settle(reserved, 0)
    refused(limited.take, "a", 1, 1)


def test_a_key_may_have_limits_of_its_own(clock: Clock) -> None:
    limited, told = limits(
        requests_per_minute=1,
        keys={
            "batch": {"api_keys": "k", "requests_per_minute": 2},
            "staff": {"api_keys": "s", "requests_per_minute": 0},
        },
    )
    batch = tenant_of("k")
    for _ in range(2):
        taken(limited.take, batch, 1, 1)
    refused(limited.take, batch, 1, 1)
    assert told == [("batch", "requests")]
    for _ in range(9):
        taken(limited.take, tenant_of("s"), 1, 1)


def test_made_up_keys_do_not_help_where_no_key_is_asked_for(clock: Clock) -> None:
    limited, _ = limits(checked=False, requests_per_minute=1, keys={"batch": {"api_keys": "k"}})
    taken(limited.take, "a", 1, 1)
    refused(limited.take, "b", 1, 1)
    taken(limited.take, tenant_of("k"), 1, 1)


@pytest.mark.parametrize(
    ("room", "previous", "previous_s", "current", "current_s", "expected"),
    [
        (0, 0, 0, 1, 20, 20.0),
        (0, 0, 0, 2, 20, 50.0),
        (9, 20, 60, 0, 60, 30.0),
        (9, 0, 0, 3, 20, 0.0),
    ],
)
def test_waiting_is_as_long_as_the_windows_say(
    room: int, previous: int, previous_s: float, current: int, current_s: float, expected: float
) -> None:
    assert wait_s(room, previous, previous_s, current, current_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("{keys: {default: {api_keys: a}}}", "stands for all other keys"),
        ("{keys: {a: {api_keys: k}, b: {api_keys: [j, k]}}}", "a key is given twice, in a and in b"),
        ("{requests_per_minute: -1}", "found -1"),
        ("{keys: {a: {api_keys: []}}}", "api_keys"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(given: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(None, [f"server.rate_limits={given}"])
