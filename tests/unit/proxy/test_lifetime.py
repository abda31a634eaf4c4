"""Metrics derive from a list of events."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.flights.lifetime import Lifetime


def lifetime(*events: tuple[str, float]) -> Lifetime:
    made = Lifetime()
    for name, at_s in events:
        made.note(name, at_s)  # type: ignore[arg-type]
    return made


def test_the_time_to_the_first_token_is_told_in_parts() -> None:
    parts = lifetime(("arrived", 1.0), ("placed", 1.5), ("prefill_started", 2.5), ("first_output", 4.5))
    told = parts.first_token_parts()
    assert told is not None
    assert (told.queue_s, told.worker_queue_s, told.prefill_s, told.total_s) == (0.5, 1.0, 2.0, 3.5)


def test_a_request_placed_twice_is_told_from_its_last_placement() -> None:
    twice = lifetime(
        ("arrived", 0.0), ("placed", 1.0), ("prefill_started", 2.0), ("placed", 5.0), ("first_output", 6.0)
    )
    told = twice.first_token_parts()
    assert told is not None
    assert (told.queue_s, told.worker_queue_s, told.prefill_s) == (5.0, 0.0, 1.0)


def test_before_the_first_output_there_are_no_parts() -> None:
    assert lifetime(("arrived", 1.0)).first_token_parts() is None


def test_a_span_needs_both_ends_in_order() -> None:
    made = lifetime(("first_output", 2.0), ("second_output", 3.0), ("first_output", 4.0))
    assert made.between("first_output", "second_output") is None
    assert lifetime(("first_output", 2.0), ("second_output", 3.0)).between("first_output", "second_output") == 1.0
    assert made.between("arrived", "first_output") is None


@given(
    waits=st.lists(st.floats(0, 10), min_size=4, max_size=4),
    has_start=st.booleans(),
)
def test_the_parts_add_up_to_the_whole(waits: list[float], has_start: bool) -> None:
    at_s, events = 0.0, []
    for name, wait_s in zip(("arrived", "placed", "prefill_started", "first_output"), waits, strict=True):
        at_s += wait_s
        if name != "prefill_started" or has_start:
            events.append((name, at_s))
    told = lifetime(*events).first_token_parts()
    assert told is not None
    assert min(told.queue_s, told.worker_queue_s, told.prefill_s) >= 0
    assert abs(told.queue_s + told.worker_queue_s + told.prefill_s - told.total_s) < 1e-9
