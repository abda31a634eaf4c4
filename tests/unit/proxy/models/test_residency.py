"""Which models are up: one claim at a time. Seconds are those of the test."""

import itertools
import math
from typing import Any

import pytest

from proxy.models.answers import Admitted, Refused, Waits
from proxy.models.residency import BACKOFF_S, STEADY_S, Residency
from proxy.models.residents import Start, State, Step, Stop
from proxy.models.terms import Terms

RESIDENCY_S = 60.0
WAIT_S = 120.0


def models(capacity: float = math.inf, max_waiting: int = 8, **policies: str) -> Residency:
    residency = Residency(capacity, max_waiting)
    for name, policy in policies.items():
        add(residency, name, policy)
    return residency


def add(residency: Residency, name: str, policy: str, now_s: float = 0.0, **terms: Any) -> None:
    given = {"min_residency_s": RESIDENCY_S, "start_wait_s": WAIT_S, **terms}
    residency.add(name, Terms(policy=policy, **given), now_s)  # type: ignore[arg-type]


def two_with_room_for_one() -> Residency:
    """`a` is up since 0 and idle, `b` is down."""
    residency = models(1, a="on_demand", b="on_demand")
    bring_up(residency, "a", 0.0)
    return residency


def bring_up(residency: Residency, name: str, now_s: float) -> None:
    """By a request that ends at once."""
    ticket = wait_for(residency, name, now_s)
    assert Start(name) in residency.step(now_s).orders
    residency.came_up(name, now_s)
    residency.step(now_s)
    residency.leave(ticket, now_s)


def wait_for(residency: Residency, name: str, now_s: float) -> int:
    answer = residency.arrive(name, now_s)
    assert isinstance(answer, Waits)
    return answer.ticket


def admitted(residency: Residency, name: str, now_s: float) -> int:
    answer = residency.arrive(name, now_s)
    assert isinstance(answer, Admitted)
    return answer.ticket


def refusal(answer: object) -> Refused:
    assert isinstance(answer, Refused)
    return answer


def state(residency: Residency, name: str) -> State:
    resident = residency.find(name)
    assert resident is not None
    return resident.state


def verdict(step: Step, ticket: int) -> Admitted | Refused:
    return next(verdict.answer for verdict in step.verdicts if verdict.ticket == ticket)


def test_pinned_models_are_started_without_being_asked_for() -> None:
    residency = models(a="pinned", b="on_demand", c="pinned")
    assert residency.step(0.0).orders == (Start("a"), Start("c"))
    assert residency.step(1.0).orders == ()


def test_a_request_starts_a_model_and_goes_on_when_it_is_up() -> None:
    residency = models(a="on_demand")
    ticket = wait_for(residency, "a", 0.0)
    step = residency.step(0.0)
    assert step.orders == (Start("a"),)
    assert step.look_again_s == WAIT_S
    residency.came_up("a", 20.0)
    step = residency.step(20.0)
    assert verdict(step, ticket) == Admitted(ticket)
    assert residency.find("a").running == {ticket}  # type: ignore[union-attr]


def test_a_model_that_is_up_takes_requests_at_once() -> None:
    residency = two_with_room_for_one()
    admitted(residency, "a", 1.0)


def test_requests_do_not_wait_where_the_policy_says_reject_but_start_the_model() -> None:
    residency = models()
    add(residency, "a", "on_demand", on_starting="reject")
    first = refusal(residency.arrive("a", 0.0))
    assert (first.status, first.reason) == (503, "starting")
    assert first.retry_after_s is not None
    assert residency.step(0.0).orders == (Start("a"),)
    residency.came_up("a", 12.0)
    admitted(residency, "a", 13.0)


def test_retry_after_counts_down_what_the_last_start_took() -> None:
    residency = models(1)
    add(residency, "a", "on_demand", on_starting="reject")
    residency.arrive("a", 0.0)
    residency.step(0.0)
    residency.came_up("a", 20.0)
    residency.ended("a", 300.0)
    residency.arrive("a", 400.0)
    residency.step(400.0)
    assert refusal(residency.arrive("a", 405.0)).retry_after_s == 15.0


def test_a_request_waits_no_longer_than_its_deadline() -> None:
    residency = models(a="on_demand")
    ticket = wait_for(residency, "a", 0.0)
    residency.step(0.0)
    step = residency.step(WAIT_S)
    assert refusal(verdict(step, ticket)).reason == "waited_too_long"
    assert state(residency, "a") is State.STARTING  # it is there for the next one


def test_so_many_may_wait_and_the_next_gets_a_429() -> None:
    residency = models(max_waiting=2, a="on_demand")
    wait_for(residency, "a", 0.0)
    wait_for(residency, "a", 0.0)
    answer = refusal(residency.arrive("a", 0.0))
    assert (answer.status, answer.reason) == (429, "queue_full")
    assert answer.retry_after_s is not None


def test_who_leaves_while_it_waits_leaves_a_place() -> None:
    residency = models(max_waiting=1, a="on_demand")
    ticket = wait_for(residency, "a", 0.0)
    residency.step(0.0)
    residency.leave(ticket, 1.0)
    residency.leave(ticket, 1.0)
    wait_for(residency, "a", 1.0)


def test_unknown_models_are_refused() -> None:
    assert refusal(models().arrive("x", 0.0)).status == 404


def test_the_least_recently_used_makes_room() -> None:
    residency = models(2, a="on_demand", b="on_demand", c="on_demand")
    bring_up(residency, "a", 0.0)
    bring_up(residency, "b", 1.0)
    residency.leave(admitted(residency, "a", 5.0), 6.0)
    wait_for(residency, "c", 100.0)
    assert residency.step(100.0).orders == (Stop("b", "evicted"),)
    assert state(residency, "c") is State.ROOM


def test_a_place_is_taken_only_when_nothing_is_left_of_who_had_it() -> None:
    residency = two_with_room_for_one()
    wait_for(residency, "b", 100.0)
    assert residency.step(100.0).orders == (Stop("a", "evicted"),)
    assert residency.step(104.0).orders == ()
    assert residency.load == 1
    residency.ended("a", 105.0)
    assert residency.step(105.0).orders == (Start("b"),)


def test_nobody_loses_its_place_before_its_residency_is_over() -> None:
    residency = two_with_room_for_one()
    wait_for(residency, "b", 1.0)
    step = residency.step(1.0)
    assert step.orders == ()
    assert step.look_again_s == RESIDENCY_S
    assert residency.step(RESIDENCY_S).orders == (Stop("a", "evicted"),)


def test_nobody_loses_its_place_while_it_has_requests() -> None:
    residency = two_with_room_for_one()
    busy = admitted(residency, "a", 10.0)
    ticket = wait_for(residency, "b", 70.0)
    assert residency.step(70.0).orders == ()
    step = residency.step(70.0 + WAIT_S)
    assert step.orders == ()
    answer = refusal(verdict(step, ticket))
    assert (answer.status, answer.reason) == (503, "no_room")
    assert answer.retry_after_s is not None
    wait_for(residency, "b", 200.0)
    residency.leave(busy, 201.0)
    assert residency.step(201.0).orders == (Stop("a", "evicted"),)


def test_alternating_requests_swap_once_per_residency() -> None:
    residency = two_with_room_for_one()
    swaps = []
    for now_s in range(1, 1001):
        for name in ("a", "b"):
            answer = residency.arrive(name, now_s)
            if isinstance(answer, Admitted):
                residency.leave(answer.ticket, now_s)
        orders = residency.step(now_s).orders
        swaps += [now_s for order in orders if isinstance(order, Stop)]
        for order in orders:
            if isinstance(order, Stop):
                residency.ended(order.name, now_s)
                (start,) = residency.step(now_s).orders
                residency.came_up(start.name, now_s)
                for settled in residency.step(now_s).verdicts:
                    residency.leave(settled.ticket, now_s)
    gaps = [after - before for before, after in itertools.pairwise(swaps)]
    assert min(gaps) >= RESIDENCY_S
    assert len(swaps) == pytest.approx(1000 / RESIDENCY_S, abs=1)


def test_pinned_models_keep_their_place() -> None:
    residency = models(2, a="pinned", b="on_demand", c="on_demand")
    residency.step(0.0)
    residency.came_up("a", 1.0)
    bring_up(residency, "b", 2.0)
    wait_for(residency, "c", 200.0)
    assert residency.step(200.0).orders == (Stop("b", "evicted"),)


def test_a_pinned_model_that_is_down_keeps_its_place_too() -> None:
    residency = models(2, a="pinned", b="on_demand", c="on_demand")
    residency.step(0.0)
    residency.came_up("a", 1.0)
    residency.ended("a", 2.0, "it crashed")
    bring_up(residency, "b", 2.0)
    wait_for(residency, "c", 2.5)
    assert residency.step(2.5).orders == ()
    assert residency.step(3.0).orders == (Start("a"),)


def test_as_few_as_possible_make_room_for_a_large_one() -> None:
    residency = models(4)
    for name, cost in (("a", 1), ("b", 1), ("large", 2), ("c", 2)):
        add(residency, name, "on_demand", cost=cost)
    bring_up(residency, "a", 0.0)
    bring_up(residency, "large", 1.0)
    bring_up(residency, "b", 2.0)
    wait_for(residency, "c", 100.0)
    assert residency.step(100.0).orders == (Stop("large", "evicted"),)


def test_two_models_never_stop_others_for_the_same_place() -> None:
    residency = models(2, a="on_demand", b="on_demand", c="on_demand", d="on_demand")
    bring_up(residency, "a", 0.0)
    bring_up(residency, "b", 1.0)
    busy = admitted(residency, "b", 2.0)
    wait_for(residency, "c", 100.0)
    wait_for(residency, "d", 101.0)
    assert residency.step(101.0).orders == (Stop("a", "evicted"),)
    residency.leave(busy, 102.0)
    assert residency.step(102.0).orders == (Stop("b", "evicted"),)
    residency.ended("b", 103.0)
    assert residency.step(103.0).orders == (Start("c"),)
    residency.ended("a", 104.0)
    assert residency.step(104.0).orders == (Start("d"),)


def test_free_room_goes_to_who_fits_while_a_large_one_waits() -> None:
    residency = models(3)
    for name, cost in (("a", 2), ("large", 3), ("small", 1)):
        add(residency, name, "on_demand", cost=cost)
    bring_up(residency, "a", 0.0)
    admitted(residency, "a", 1.0)
    wait_for(residency, "large", 2.0)
    wait_for(residency, "small", 3.0)
    assert residency.step(3.0).orders == (Start("small"),)


def test_scale_to_zero_stops_after_idle_time() -> None:
    residency = models()
    add(residency, "a", "scale_to_zero", idle_s=300.0)
    bring_up(residency, "a", 10.0)
    ticket = admitted(residency, "a", 100.0)
    assert residency.step(1000.0).orders == ()
    residency.leave(ticket, 1000.0)
    assert residency.step(1000.0).look_again_s == 1300.0
    assert residency.step(1300.0).orders == (Stop("a", "idle"),)
    residency.ended("a", 1301.0)
    wait_for(residency, "a", 1302.0)
    assert residency.step(1302.0).orders == (Start("a"),)


def test_on_demand_stays_up_while_nobody_needs_its_place() -> None:
    residency = two_with_room_for_one()
    assert residency.step(1e6).orders == ()


def test_a_request_for_a_model_that_is_stopping_starts_it_again_when_it_is_gone() -> None:
    residency = models(a="scale_to_zero")
    bring_up(residency, "a", 0.0)
    residency.step(1000.0)
    wait_for(residency, "a", 1001.0)
    assert residency.step(1001.0).orders == ()
    residency.ended("a", 1002.0)
    assert residency.step(1002.0).orders == (Start("a"),)


def test_who_waits_for_a_model_that_does_not_come_up_is_told_why() -> None:
    residency = models(a="on_demand")
    ticket = wait_for(residency, "a", 0.0)
    residency.step(0.0)
    residency.ended("a", 5.0, "no such model directory")
    answer = refusal(verdict(residency.step(5.0), ticket))
    assert (answer.status, answer.reason) == (503, "start_failed")
    assert "no such model directory" in answer.text
    later = refusal(residency.arrive("a", 5.5))
    assert later.reason == "start_failed"
    wait_for(residency, "a", 5.0 + BACKOFF_S[0])


def test_a_pinned_model_is_started_again_ever_more_slowly() -> None:
    residency = models(a="pinned")
    now_s = 0.0
    for pause_s in (*BACKOFF_S, BACKOFF_S[-1]):
        assert residency.step(now_s).orders == (Start("a"),)
        residency.ended("a", now_s, "it crashed")
        step = residency.step(now_s)
        assert (step.orders, step.look_again_s) == ((), now_s + pause_s)
        now_s += pause_s


def test_failures_are_forgotten_after_a_steady_time() -> None:
    residency = models(a="pinned")
    residency.step(0.0)
    residency.ended("a", 0.0)
    residency.step(1.0)
    residency.came_up("a", 2.0)
    residency.ended("a", 2.0 + STEADY_S)
    assert residency.step(2.0 + STEADY_S).look_again_s == 2.0 + STEADY_S + BACKOFF_S[0]


def test_a_removed_model_finishes_its_requests_leaves_the_map_and_then_stops() -> None:
    residency = models(a="pinned")
    residency.step(0.0)
    residency.came_up("a", 1.0)
    ticket = admitted(residency, "a", 2.0)
    residency.remove("a", 3.0, within_s=100.0)
    step = residency.step(3.0)
    assert (step.orders, step.off_the_map, step.look_again_s) == ((), (), 103.0)
    assert refusal(residency.arrive("a", 4.0)).reason == "removed"
    residency.leave(ticket, 10.0)
    step = residency.step(10.0)
    assert (step.off_the_map, step.orders) == (("a",), (Stop("a", "removed"),))
    assert refusal(residency.arrive("a", 11.0)).reason == "unknown_model"
    assert residency.load == 1  # its processes still have their place
    with pytest.raises(ValueError, match="there already"):
        add(residency, "a", "pinned", 11.0)
    residency.ended("a", 12.0)
    assert residency.find("a") is None
    add(residency, "a", "pinned", 13.0)
    assert residency.step(13.0).orders == (Start("a"),)


def test_removing_breaks_off_what_is_not_finished_in_time() -> None:
    residency = two_with_room_for_one()
    ticket = admitted(residency, "a", 2.0)
    residency.remove("a", 3.0, within_s=100.0)
    assert residency.step(103.0).orders == (Stop("a", "removed"),)
    residency.ended("a", 104.0)
    residency.leave(ticket, 104.0)
    assert residency.step(104.0).orders == ()


def test_who_waited_before_a_model_was_removed_is_still_served() -> None:
    residency = models(a="on_demand")
    ticket = wait_for(residency, "a", 0.0)
    residency.remove("a", 0.0, within_s=100.0)
    assert residency.step(0.0).orders == (Start("a"),)
    residency.came_up("a", 20.0)
    step = residency.step(20.0)
    assert verdict(step, ticket) == Admitted(ticket)
    assert step.off_the_map == ()
    residency.leave(ticket, 21.0)
    assert residency.step(21.0).orders == (Stop("a", "removed"),)


def test_one_that_comes_up_when_it_was_told_to_stop_still_stops() -> None:
    residency = models(a="pinned")
    residency.step(0.0)
    residency.remove("a", 1.0, within_s=100.0)
    assert residency.step(1.0).orders == (Stop("a", "removed"),)
    residency.came_up("a", 2.0)
    assert state(residency, "a") is State.STOPPING
    residency.ended("a", 3.0)
    assert residency.find("a") is None


@pytest.mark.parametrize("policy", ["on_demand", "pinned"])
def test_a_model_that_is_down_is_removed_at_once(policy: str) -> None:
    residency = models(a=policy)
    residency.remove("a", 0.0, within_s=100.0)
    step = residency.step(0.0)
    assert (step.off_the_map, step.orders) == (("a",), ())
    assert residency.find("a") is None


def test_a_second_removal_can_only_shorten_the_time() -> None:
    residency = two_with_room_for_one()
    admitted(residency, "a", 2.0)
    residency.remove("a", 3.0, within_s=100.0)
    residency.remove("a", 3.0, within_s=500.0)
    assert residency.step(3.0).look_again_s == 103.0
    residency.remove("a", 4.0, within_s=1.0)
    assert residency.step(5.0).orders == (Stop("a", "removed"),)


def test_when_the_front_stops_nobody_waits_and_nothing_starts() -> None:
    residency = models(a="on_demand", b="pinned")
    ticket = wait_for(residency, "a", 0.0)
    residency.close(0.0)
    step = residency.step(0.0)
    assert refusal(verdict(step, ticket)).reason == "stopping"
    assert (step.orders, step.look_again_s) == ((), None)
    assert refusal(residency.arrive("b", 1.0)).reason == "stopping"
