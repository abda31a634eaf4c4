"""How long what keeps failing waits."""

from itertools import pairwise

import pytest

from cluster.fleet import restarts
from cluster.launch import guard
from cluster.launch.backoff import Backoff


def test_each_failure_in_a_row_waits_longer_up_to_the_last_pause() -> None:
    backoff = Backoff((1.0, 3.0, 10.0), steady_s=60.0)
    assert [backoff.failed(lasted_s) for lasted_s in (0.0, 59.0, 0.0, 5.0)] == [1.0, 3.0, 10.0, 10.0]
    assert backoff.failures == 4


def test_a_failure_after_a_steady_time_is_the_first_of_a_new_row() -> None:
    backoff = Backoff((1.0, 3.0, 10.0), steady_s=60.0, failures=7)
    assert [backoff.failed(lasted_s) for lasted_s in (60.0, 0.0)] == [1.0, 3.0]
    backoff.forget()
    assert backoff.failed(0.0) == 1.0


@pytest.mark.parametrize("pauses_s", [restarts.BACKOFF_S, guard.PAUSES_S])
def test_no_pause_in_use_is_shorter_than_the_one_before_or_longer_than_a_minute(pauses_s: tuple[float, ...]) -> None:
    assert all(earlier < later <= 60.0 for earlier, later in pairwise(pauses_s))
