"""When a draining worker may leave or change its role."""

import math

import msgspec
import pytest

from cluster.frames import BadFrame, reader
from cluster.host.drain import SETTLE_S, Carried, Drain
from cluster.messages import LEAVE, ToWorker
from cluster.messages import Drain as DrainOrder

EMPTY = Carried(0, 0, -math.inf, has_proxy=True)


def draining(goal: str = LEAVE, role: str = "decode") -> Drain:
    drain = Drain()
    assert drain.begin(goal, role, now_s=100.0, timeout_s=10.0)
    return drain


def test_who_does_not_drain_waits_for_nothing() -> None:
    assert Drain().stage(EMPTY, 0.0) == "none"
    assert Drain().look_again_in_s(EMPTY, 0.0) is None


def test_an_idle_worker_leaves_as_soon_as_the_proxy_says_that_nothing_comes() -> None:
    drain = draining()
    assert drain.stage(EMPTY, 100.0) == "waits"
    drain.nothing_more(drain.number)
    assert drain.stage(EMPTY, 100.0) == "done"
    assert drain.look_again_in_s(EMPTY, 100.0) == 0.0


def test_without_a_proxy_nobody_is_waited_for() -> None:
    assert draining().stage(Carried(0, 0, -math.inf, has_proxy=False), 100.0) == "done"


@pytest.mark.parametrize("carried", [Carried(1, 0, 0.0, True), Carried(0, 1, 0.0, True)])
def test_requests_and_transfers_are_finished_first(carried: Carried) -> None:
    drain = draining()
    drain.nothing_more(drain.number)
    assert drain.stage(carried, 109.0) == "waits"
    assert drain.look_again_in_s(carried, 109.0) == 1.0
    assert drain.stage(carried, 110.0) == "overdue"


def test_after_the_last_request_one_more_count_of_the_ranks_is_waited_for() -> None:
    drain = draining()
    drain.nothing_more(drain.number)
    just_ended = Carried(0, 0, 104.0, has_proxy=True)
    assert drain.stage(just_ended, 104.5) == "waits"
    assert drain.look_again_in_s(just_ended, 104.5) == SETTLE_S - 0.5
    assert drain.stage(just_ended, 104.0 + SETTLE_S) == "done"


def test_what_the_proxy_said_of_an_earlier_drain_means_nothing() -> None:
    drain = draining("prefill")
    drain.nothing_more(drain.number)
    drain.end()
    drain.nothing_more(1)
    assert drain.begin(LEAVE, "prefill", 101.0, 10.0)
    drain.nothing_more(1)
    assert drain.stage(EMPTY, 101.0) == "waits"
    drain.nothing_more(2)
    assert drain.stage(EMPTY, 101.0) == "done"


def test_the_same_order_again_can_only_shorten_the_time() -> None:
    drain = draining()
    assert not drain.begin(LEAVE, "decode", 101.0, 100.0)
    assert drain.look_again_in_s(EMPTY, 101.0) == 9.0
    assert not drain.begin(LEAVE, "decode", 101.0, 2.0)
    assert drain.look_again_in_s(EMPTY, 101.0) == 2.0


def test_leaving_wins_over_a_change_of_the_role() -> None:
    drain = draining("prefill")
    assert drain.begin(LEAVE, "decode", 101.0, 10.0)
    assert drain.goal == LEAVE
    assert not drain.begin("prefill", "decode", 102.0, 10.0)
    assert drain.goal == LEAVE


def test_the_present_role_is_no_change_and_ends_one() -> None:
    drain = Drain()
    assert not drain.begin("decode", "decode", 0.0, 10.0)
    assert drain.number == 0
    assert drain.begin("prefill", "decode", 0.0, 10.0)
    assert drain.begin("decode", "decode", 1.0, 10.0), "the proxy must hear that it takes requests again"
    assert drain.goal == ""


@pytest.mark.parametrize("goal", ["", "proxy", "decode\n", "leave it"])
def test_an_order_to_become_something_else_is_no_message(goal: str) -> None:
    read = reader(msgspec.msgpack.Decoder[ToWorker](ToWorker))
    assert read(msgspec.msgpack.encode(DrainOrder("decode", 1.0))) == DrainOrder("decode", 1.0)
    with pytest.raises(BadFrame):
        read(msgspec.msgpack.encode(DrainOrder(goal, 1.0)))
