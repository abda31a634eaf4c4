"""Metrics derive from a list of events."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trips.lifetime import FirstTokenParts, Lifetime, SecondTokenParts


def lifetime(*events: tuple[str, float], first_from: Any = "prefill") -> Lifetime:
    made = Lifetime(first_from=first_from)
    for name, at_s in events:
        made.note(name, at_s)  # type: ignore[arg-type]
    return made


ARRIVAL = (("arrived", 1.0), ("received", 1.25), ("placed", 1.5))


@pytest.mark.parametrize(
    ("first_from", "events", "parts"),
    [
        (
            "prefill",
            (("prefill_started", 2.5), ("prefill_scheduled", 2.0), ("prefill_ended", 4.5), ("first_output", 4.5)),
            FirstTokenParts(0.25, 0.25, 0.0, 1.0, 2.0),
        ),
        (
            "prefill",
            (("prefill_scheduled", 2.0), ("first_output", 4.5)),
            FirstTokenParts(0.25, 0.25, 0.0, 0.5, 2.5),
        ),
        ("local", (("local_scheduled", 2.0), ("first_output", 4.5)), FirstTokenParts(0.25, 0.25, 0.0, 0.5, 2.5)),
        ("local", (("first_output", 4.5),), FirstTokenParts(0.25, 0.25, 0.0, 0.0, 3.0)),
        (
            "decode",
            (
                ("prefill_started", 2.0),
                ("prefill_ended", 3.0),
                ("handover_closed", 3.5),
                ("decode_scheduled", 4.0),
                ("first_output", 4.5),
            ),
            FirstTokenParts(0.25, 0.25, 0.0, 0.5, 1.0, 0.5, 0.5, 0.5),
        ),
        (
            "decode",
            (("prefill_started", 2.0), ("decode_scheduled", 3.0), ("first_output", 4.5)),
            FirstTokenParts(0.25, 0.25, 0.0, 0.5, 2.5),
        ),
    ],
    ids=["remote", "start not told", "local", "engine without statistics", "exact mode", "prefill worker lost"],
)
def test_the_time_to_the_first_token_is_told_in_parts(first_from: Any, events: Any, parts: FirstTokenParts) -> None:
    assert lifetime(*ARRIVAL, *events, first_from=first_from).first_token_parts() == parts


def test_a_lost_attempt_is_a_part_of_its_own() -> None:
    told = lifetime(
        *ARRIVAL,
        ("prefill_started", 2.0),
        ("placed_anew", 3.0),
        ("placed", 3.25),
        ("prefill_started", 3.5),
        ("first_output", 5.0),
    ).first_token_parts()
    assert told == FirstTokenParts(0.25, 0.5, 1.5, 0.25, 1.5)


def test_what_happens_after_the_first_token_does_not_change_its_parts() -> None:
    made = lifetime(*ARRIVAL, ("first_output", 4.5))
    told = made.first_token_parts()
    made.note("placed_anew", 6.0)
    made.note("placed", 6.0)
    assert made.first_token_parts() is told


def test_before_the_first_output_there_are_no_parts() -> None:
    assert lifetime(("arrived", 1.0)).first_token_parts() is None


def test_the_gap_to_the_second_token_is_told_in_parts() -> None:
    made = lifetime(("first_output", 1.0), ("handover_closed", 1.25), ("decode_scheduled", 1.5), ("second_output", 2.5))
    assert made.second_token_parts() == SecondTokenParts(0.25, 0.25, 1.0)
    unknown = lifetime(("first_output", 1.0), ("second_output", 2.5))
    assert unknown.second_token_parts() == SecondTokenParts(0.0, 0.0, 1.5)
    assert lifetime(("first_output", 1.0), ("second_output", 2.5), first_from="local").second_token_parts() is None


def test_a_span_needs_both_ends_in_order() -> None:
    made = lifetime(("first_output", 2.0), ("second_output", 3.0), ("first_output", 4.0))
    assert made.between("first_output", "second_output") is None
    assert lifetime(("first_output", 2.0), ("second_output", 3.0)).between("first_output", "second_output") == 1.0
    assert made.between("arrived", "first_output") is None


MIDDLE = (
    "received", "placed", "prefill_started", "prefill_scheduled", "placed_anew", "placed", "prefill_started",
    "prefill_ended", "handover_closed", "decode_scheduled", "local_scheduled",
)  # fmt: skip


@given(
    times=st.lists(st.floats(-5, 20), min_size=len(MIDDLE), max_size=len(MIDDLE)),
    happened=st.sets(st.sampled_from(range(len(MIDDLE)))),
    in_order=st.booleans(),
    first_from=st.sampled_from(["prefill", "decode", "local"]),
)
def test_the_parts_add_up_to_the_whole(times: list[float], happened: set[int], in_order: bool, first_from: Any) -> None:
    """Whatever is missing, and however far an engine's clock is off."""
    at_s = sorted(times) if in_order else times
    events = [(name, at_s[index]) for index, name in enumerate(MIDDLE) if index in happened]
    told = lifetime(("arrived", 0.0), *events, ("first_output", 10.0), first_from=first_from).first_token_parts()
    assert told is not None
    assert min(told.by_name().values()) >= 0
    assert told.total_s == pytest.approx(10.0, abs=1e-9)
