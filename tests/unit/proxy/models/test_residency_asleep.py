"""Models that sleep instead of being stopped: one claim at a time."""

from proxy.models.answers import Admitted
from proxy.models.residency import Residency
from proxy.models.residents import Order, Sleep, Start, State, Stop, Wake
from proxy.models.terms import Terms
from tests.unit.proxy.models.test_residency import refusal, state, verdict, wait_for

TERMS = Terms(policy="on_demand", min_residency_s=0, sleeps=True)


def sleepers(max_asleep: int, names: str = "abc", capacity: int = 1) -> Residency:
    residency = Residency(capacity, max_asleep=max_asleep)
    for name in names:
        residency.add(name, TERMS, 0.0)
    return residency


def orders(residency: Residency, now_s: float) -> tuple[Order, ...]:
    return residency.step(now_s).orders


def bring_up(residency: Residency, name: str, now_s: float) -> None:
    """With a request that ends at once. Whoever must make room is ordered to before."""
    ticket = wait_for(residency, name, now_s)
    residency.step(now_s)
    residency.came_up(name, now_s)
    residency.step(now_s)
    residency.leave(ticket, now_s)


def test_who_makes_room_sleeps_and_the_other_starts_when_it_does() -> None:
    residency = sleepers(2)
    bring_up(residency, "a", 0.0)
    wait_for(residency, "b", 10.0)
    assert orders(residency, 10.0) == (Sleep("a", "evicted"),)
    assert residency.load == 1
    residency.fell_asleep("a", 12.0)
    assert orders(residency, 12.0) == (Start("b"),)
    assert (state(residency, "a"), residency.load) == (State.ASLEEP, 1)


def asleep_and_up(residency: Residency) -> None:
    """`a` sleeps, `b` is up since 20."""
    bring_up(residency, "a", 0.0)
    ticket = wait_for(residency, "b", 10.0)
    residency.step(10.0)
    residency.fell_asleep("a", 12.0)
    residency.step(12.0)
    residency.came_up("b", 20.0)
    residency.step(20.0)
    residency.leave(ticket, 20.0)


def test_who_sleeps_is_woken_by_a_request_when_its_place_is_free() -> None:
    residency = sleepers(2)
    asleep_and_up(residency)
    ticket = wait_for(residency, "a", 30.0)
    assert orders(residency, 30.0) == (Sleep("b", "evicted"),)
    residency.fell_asleep("b", 31.0)
    assert orders(residency, 31.0) == (Wake("a"),)
    assert residency.load == 1
    residency.came_up("a", 33.0)
    assert isinstance(verdict(residency.step(33.0), ticket), Admitted)
    resident = residency.find("a")
    assert resident is not None
    assert (resident.starts, resident.wakes, resident.takes_s) == (1, 1, 2.0)


def test_without_a_bed_who_makes_room_is_stopped() -> None:
    residency = sleepers(0)
    bring_up(residency, "a", 0.0)
    wait_for(residency, "b", 10.0)
    assert orders(residency, 10.0) == (Stop("a", "evicted"),)


def test_a_sleeper_that_nobody_asks_for_leaves_its_bed_before_another_takes_it() -> None:
    residency = sleepers(1)
    asleep_and_up(residency)
    wait_for(residency, "c", 30.0)
    assert orders(residency, 30.0) == (Stop("a", "displaced"),)
    assert (state(residency, "b"), residency.load) == (State.FALLING_ASLEEP, 1)
    residency.ended("a", 31.0)
    assert orders(residency, 31.0) == (Sleep("b", "evicted"),)
    residency.fell_asleep("b", 32.0)
    assert orders(residency, 32.0) == (Start("c"),)


def test_a_sleeper_that_is_asked_for_keeps_its_bed_and_the_other_is_stopped() -> None:
    residency = sleepers(1)
    asleep_and_up(residency)
    wait_for(residency, "a", 30.0)
    assert orders(residency, 30.0) == (Stop("b", "evicted"),)
    residency.ended("b", 31.0)
    assert orders(residency, 31.0) == (Wake("a"),)


def test_the_hosts_memory_of_one_that_slept_counts_until_its_processes_end() -> None:
    residency = sleepers(1, capacity=2)
    bring_up(residency, "a", 0.0)
    bring_up(residency, "b", 1.0)
    wait_for(residency, "c", 2.0)
    assert orders(residency, 2.0) == (Sleep("a", "evicted"),)
    residency.fell_asleep("a", 3.0)
    residency.step(3.0)
    residency.came_up("c", 4.0)
    for ticket in list(residency._owners):
        residency.leave(ticket, 4.0)
    wait_for(residency, "a", 5.0)
    assert orders(residency, 5.0) == (Stop("b", "evicted"),), "the only bed is that of a"
    residency.ended("b", 6.0)
    assert orders(residency, 6.0) == (Wake("a"),)
    residency.came_up("a", 7.0)
    for ticket in list(residency._owners):
        residency.leave(ticket, 7.0)
    wait_for(residency, "b", 8.0)
    assert orders(residency, 8.0) == (Stop("c", "evicted"),)


def test_one_that_does_not_wake_is_stopped_and_started_for_those_that_wait() -> None:
    residency = sleepers(2, "ab")
    asleep_and_up(residency)
    ticket = wait_for(residency, "a", 30.0)
    residency.step(30.0)
    residency.fell_asleep("b", 31.0)
    residency.step(31.0)
    residency.got_stuck("a", "out of memory")
    assert orders(residency, 32.0) == (Stop("a", "stuck"),)
    assert residency.load == 1
    residency.ended("a", 33.0)
    step = residency.step(33.0)
    assert (step.orders, step.verdicts) == ((Start("a"),), ())
    residency.came_up("a", 60.0)
    assert isinstance(verdict(residency.step(60.0), ticket), Admitted)


def test_one_that_ends_while_it_is_woken_is_started_at_once() -> None:
    residency = sleepers(2, "ab")
    asleep_and_up(residency)
    wait_for(residency, "a", 30.0)
    residency.step(30.0)
    residency.fell_asleep("b", 31.0)
    residency.step(31.0)
    residency.ended("a", 32.0, "the cluster ended")
    residency.got_stuck("a", "told too late")
    assert orders(residency, 32.0) == (Start("a"),)


def test_one_that_does_not_fall_asleep_is_stopped() -> None:
    residency = sleepers(2)
    bring_up(residency, "a", 0.0)
    wait_for(residency, "b", 10.0)
    residency.step(10.0)
    residency.got_stuck("a", "a transfer is open")
    assert orders(residency, 11.0) == (Stop("a", "stuck"),)
    residency.ended("a", 12.0)
    assert orders(residency, 12.0) == (Start("b"),)


def test_the_death_of_a_sleeper_is_no_failure_and_the_next_request_starts_it() -> None:
    residency = sleepers(2)
    asleep_and_up(residency)
    residency.ended("a", 25.0, "killed")
    assert state(residency, "a") is State.DOWN
    wait_for(residency, "a", 26.0)
    assert orders(residency, 26.0) == (Sleep("b", "evicted"),)
    residency.fell_asleep("b", 27.0)
    assert orders(residency, 27.0) == (Start("a"),)


def test_the_death_of_a_sleeper_that_has_its_place_already_makes_it_start() -> None:
    residency = sleepers(2)
    asleep_and_up(residency)
    wait_for(residency, "a", 30.0)
    residency.step(30.0)
    residency.ended("a", 30.5, "killed")
    residency.fell_asleep("b", 31.0)
    assert orders(residency, 31.0) == (Start("a"),)


def test_a_request_for_one_that_falls_asleep_waits_and_wakes_it() -> None:
    residency = Residency(max_asleep=1)
    residency.add("a", Terms(policy="scale_to_zero", idle_s=5, min_residency_s=0, sleeps=True), 0.0)
    bring_up(residency, "a", 0.0)
    assert residency.step(0.0).look_again_s == 5.0
    assert orders(residency, 5.0) == (Sleep("a", "idle"),)
    wait_for(residency, "a", 6.0)
    assert orders(residency, 6.0) == ()
    residency.fell_asleep("a", 7.0)
    assert orders(residency, 7.0) == (Wake("a"),)


def test_a_sleeper_that_is_removed_is_stopped_and_gone() -> None:
    residency = sleepers(2)
    asleep_and_up(residency)
    residency.remove("a", 30.0, 10.0)
    assert orders(residency, 30.0) == (Stop("a", "removed"),)
    assert residency.load == 1
    residency.ended("a", 31.0)
    assert residency.find("a") is None


def test_who_is_refused_is_told_that_the_model_is_being_woken() -> None:
    residency = sleepers(2)
    asleep_and_up(residency)
    wait_for(residency, "a", 30.0)
    residency.step(30.0)
    residency.fell_asleep("b", 31.0)
    residency.step(31.0)
    residency._max_waiting = 1
    assert "wait for the model" in refusal(residency.arrive("a", 32.0)).text
    residency.step(31.0)
    told = next(v.answer for v in residency.step(200.0).verdicts)
    assert "is being woken" in refusal(told).text
