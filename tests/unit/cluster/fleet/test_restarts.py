"""Which worker is started again, and when."""

import signal

import pytest

from cluster.fleet.restarts import BACKOFF_S, STEADY_S, Restarts, StartAgain, StayDown


def after_s(restarts: Restarts, returncode: int = 1, now_s: float = 0.0) -> float | None:
    """Seconds until it is started again; None if it is not."""
    outlook = restarts.ended("prefill-0", returncode, now_s)
    return outlook.after_s if isinstance(outlook, StartAgain) else None


@pytest.mark.parametrize(
    ("mode", "after_failure", "after_sigterm"),
    [("on_failure", True, False), ("never", False, False), ("always", True, True)],
)
def test_the_mode_decides(mode: str, after_failure: bool, after_sigterm: bool) -> None:
    for returncode, expected in [
        (1, after_failure),
        (-signal.SIGKILL, after_failure),
        (0, after_sigterm),
        (-signal.SIGTERM, after_sigterm),
    ]:
        restarts = Restarts(mode)  # type: ignore[arg-type]
        assert (after_s(restarts, returncode) is not None) == expected, (mode, returncode)


def test_each_quick_failure_waits_longer_and_one_too_many_is_the_last() -> None:
    restarts = Restarts("on_failure")
    assert [after_s(restarts) for _ in BACKOFF_S] == list(BACKOFF_S)
    outlook = restarts.ended("prefill-0", 1, 0.0)
    assert isinstance(outlook, StayDown)
    assert "failed 5 times in a row" in outlook.text
    assert "twinpool restart prefill-0" in outlook.text
    assert restarts.ended("decode-0", 1, 0.0) == StartAgain(1.0, "it is started again in 1 s"), "each by itself"


def test_a_worker_that_comes_up_is_never_given_up() -> None:
    restarts = Restarts("on_failure")
    for number in range(20):
        restarts.joined("prefill-0", float(number))
        assert after_s(restarts, now_s=number + 0.5) == BACKOFF_S[min(number, len(BACKOFF_S) - 1)]
    assert after_s(restarts) is None, "now it does not even come up"


def test_some_time_in_the_cluster_ends_the_row() -> None:
    restarts = Restarts("on_failure")
    for _ in range(3):
        after_s(restarts)
    restarts.joined("prefill-0", 100.0)
    assert after_s(restarts, now_s=100.0 + STEADY_S) == BACKOFF_S[0]
    restarts.joined("prefill-0", 200.0)
    assert after_s(restarts, now_s=201.0) == BACKOFF_S[1]
    assert after_s(restarts, now_s=400.0) == BACKOFF_S[2], "a start that takes minutes and fails is no time at work"


def test_an_order_wins_over_the_mode_and_holds_once() -> None:
    always, never = Restarts("always"), Restarts("never")
    always.order("prefill-0", "stay")
    assert after_s(always, 0) is None
    assert after_s(always, 0) is not None
    never.order("prefill-0", "start")
    assert after_s(never, 0) == 0.0
    assert after_s(never, 0) is None


def test_who_is_tried_anew_has_no_past() -> None:
    restarts = Restarts("on_failure")
    for _ in range(3):
        after_s(restarts)
    restarts.forgive("prefill-0")
    assert after_s(restarts) == BACKOFF_S[0]
