"""The state machine of one request, event by event; `test_flight_interleavings` tries them in any order."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.flights.actions import (
    AbortLeg,
    Action,
    Continue,
    DropTransfer,
    Emit,
    Fail,
    PlaceAnew,
    SendFirstToken,
    SubmitDecode,
    SubmitPrefill,
)
from proxy.flights.events import (
    Aborted,
    CannotContinue,
    Cause,
    Continued,
    DeadlinePassed,
    Event,
    HandoverClosed,
    LegOutput,
    Placed,
    PrefillStarted,
    WorkerLost,
)
from proxy.flights.flight import Flight, IllegalTransition, Stage
from proxy.flights.transitions import advance, passes_on
from proxy.scheduling.place import Local, PrefillOnly, Reject, Remote

LOST = Cause("silent", "it was lost")
REMOTE = Placed(Remote("p0", "d0", "remote"))


def flight(**changes: Any) -> Flight:
    fresh = Flight(
        num_prompt_tokens=100,
        max_tokens=16,
        max_model_len=1000,
        first_token_mode=True,
        wants_prompt_scores=False,
        reserve_at_start=True,
    )
    return replace(fresh, **changes)


def run(start: Flight, *events: Event) -> tuple[Flight, list[Action]]:
    actions: list[Action] = []
    for event in events:
        step = advance(start, event)
        start = step.flight
        actions += step.actions
    return start, actions


def prefill_output(finish: Any = "length", token: int | None = 7) -> LegOutput:
    return LegOutput("prefill", token, finish, "first")


def decode_output(payload: str = "more", finish: Any = None) -> LegOutput:
    return LegOutput("decode", 8, finish, payload)


def test_a_request_goes_through_both_workers() -> None:
    end, actions = run(
        flight(),
        REMOTE,
        PrefillStarted(),
        prefill_output(),
        HandoverClosed("loaded"),
        decode_output(),
        decode_output("last", "stop"),
    )
    assert actions == [
        SubmitPrefill("p0"),
        SubmitDecode("d0"),
        Emit("prefill", "first", finished=False),
        SendFirstToken("d0", 7),
        Emit("decode", "more", finished=False),
        Emit("decode", "last", finished=True),
    ]
    assert end.finished


def test_outputs_pass_on_once_the_client_has_the_first() -> None:
    begun = (REMOTE, PrefillStarted(), prefill_output())
    assert [passes_on(run(flight(), *begun[:n])[0]) for n in range(4)] == [None, None, None, "decode"]
    assert passes_on(run(flight(first_token_mode=False), *begun)[0]) is None, "what the prefill knows goes with it"
    local = run(flight(), Placed(Local("d0", "short_prompt")))[0]
    assert passes_on(local) is None
    assert passes_on(run(local, LegOutput("local", 8, None, "a"))[0]) == "local"


def test_the_decode_leg_waits_for_the_prefill_when_it_reserves_at_the_end() -> None:
    late = flight(reserve_at_start=False)
    _, actions = run(late, REMOTE, PrefillStarted(), prefill_output())
    assert actions == [
        SubmitPrefill("p0"),
        Emit("prefill", "first", finished=False),
        SubmitDecode("d0"),
        SendFirstToken("d0", 7),
    ]


def test_the_decode_leg_is_submitted_with_the_first_token_when_nobody_said_the_prefill_started() -> None:
    _, actions = run(flight(), REMOTE, prefill_output())
    assert SubmitDecode("d0") in actions


@pytest.mark.parametrize("finish", ["stop", "error", "repetition"])
def test_a_first_token_that_ends_the_request_frees_both_workers(finish: Any) -> None:
    end, actions = run(flight(), REMOTE, PrefillStarted(), prefill_output(finish))
    assert actions[2:] == [Emit("prefill", "first", finished=True), AbortLeg("decode", "d0"), DropTransfer("p0")]
    assert end.finished


def test_a_first_token_that_ends_the_request_starts_no_decode_leg() -> None:
    _, actions = run(flight(), REMOTE, prefill_output("stop"))
    assert actions == [SubmitPrefill("p0"), Emit("prefill", "first", finished=True), DropTransfer("p0")]


def test_the_prefill_workers_length_is_ours_unless_the_context_is_full() -> None:
    roomy, _ = run(flight(), REMOTE, prefill_output("length"))
    full, actions = run(flight(num_prompt_tokens=999), REMOTE, prefill_output("length"))
    assert roomy.stage is Stage.HANDING_OVER
    assert full.finished
    assert Emit("prefill", "first", finished=True) in actions


def test_exact_mode_drops_the_prefill_token_and_merges_what_it_knows() -> None:
    exact = flight(first_token_mode=False)
    end, actions = run(exact, REMOTE, PrefillStarted(), prefill_output("stop"), decode_output("a"), decode_output("b"))
    assert actions[2:] == [
        Emit("decode", "a", finished=False, prefill="first"),
        Emit("decode", "b", finished=False),
    ]
    assert end.emitted


@pytest.mark.parametrize("first_token_mode", [True, False])
def test_outputs_that_overtake_the_first_token_wait_for_it(first_token_mode: bool) -> None:
    start = flight(first_token_mode=first_token_mode)
    held, before = run(start, REMOTE, PrefillStarted(), HandoverClosed("loaded"), decode_output("a"))
    assert not any(isinstance(action, Emit) for action in before)
    end, after = run(held, prefill_output())
    payloads = [action.payload for action in after if isinstance(action, Emit)]
    assert payloads == (["first", "a"] if first_token_mode else ["a"])
    assert end.stage is Stage.DECODING


def test_a_prefill_worker_lost_before_the_first_token_is_replaced() -> None:
    again, actions = run(flight(), REMOTE, PrefillStarted(), WorkerLost("p0", LOST))
    assert actions[2:] == [AbortLeg("decode", "d0"), PlaceAnew(LOST, "p0")]
    assert again.stage is Stage.WAITING


@pytest.mark.parametrize("max_losses", [1, 2, 3])
def test_a_request_that_loses_its_workers_without_a_token_in_between_fails(max_losses: int) -> None:
    going = flight(max_losses=max_losses)
    for _ in range(max_losses - 1):
        going, actions = run(going, REMOTE, WorkerLost("p0", LOST))
        assert actions[-1] == PlaceAnew(LOST, "p0")
    end, actions = run(going, REMOTE, WorkerLost("p0", LOST))
    assert isinstance(actions[-1], Fail)
    assert (actions[-1].status, actions[-1].cause.kind) == (503, LOST.kind)
    assert actions[-1].cause.message.startswith(LOST.message)
    assert end.finished


def test_losses_of_workers_that_had_nothing_of_it_yet_do_not_count() -> None:
    going = flight(max_losses=1)
    for _ in range(3):
        going, actions = run(going, REMOTE, WorkerLost("d0", LOST))
        assert actions[-1] == PlaceAnew(LOST, "d0")


def test_one_new_token_between_losses_is_enough() -> None:
    going = flight(max_losses=2)
    for _ in range(5):
        going, actions = run(going, REMOTE, prefill_output(), WorkerLost("d0", LOST), Continued(101, 15, True))
        assert actions[-1] == Continue(LOST, "d0")
    going, _ = run(going, REMOTE, WorkerLost("p0", LOST))
    assert going.finished


def test_a_prefill_worker_lost_after_the_first_token_changes_nothing() -> None:
    going, actions = run(flight(), REMOTE, PrefillStarted(), prefill_output(), WorkerLost("p0", LOST))
    end, more = run(going, HandoverClosed("recompute"), decode_output("last", "stop"))
    assert actions[-1] == SendFirstToken("d0", 7)
    assert more == [Emit("decode", "last", finished=True)]
    assert end.finished


def test_in_exact_mode_the_decode_worker_goes_on_without_the_prefill_worker() -> None:
    exact = flight(first_token_mode=False)
    going, actions = run(exact, REMOTE, PrefillStarted(), decode_output("a"), WorkerLost("p0", LOST))
    assert actions[2:] == [Emit("decode", "a", finished=False)]
    assert going.stage is Stage.HANDING_OVER


def test_in_exact_mode_lost_prompt_scores_are_computed_again() -> None:
    scored = flight(first_token_mode=False, wants_prompt_scores=True)
    again, actions = run(scored, REMOTE, PrefillStarted(), WorkerLost("p0", LOST))
    assert actions[-1] == PlaceAnew(LOST, "p0")
    assert again.stage is Stage.WAITING


def test_a_decode_worker_lost_during_the_prefill_is_replaced() -> None:
    again, actions = run(flight(), REMOTE, PrefillStarted(), WorkerLost("d0", LOST))
    assert actions[2:] == [AbortLeg("prefill", "p0"), DropTransfer("p0"), PlaceAnew(LOST, "d0")]
    assert again.stage is Stage.WAITING


def test_a_decode_worker_lost_after_the_first_token_drops_the_lease_and_the_answer_goes_on() -> None:
    again, actions = run(flight(), REMOTE, PrefillStarted(), prefill_output(), WorkerLost("d0", LOST))
    assert actions[4:] == [DropTransfer("p0"), Continue(LOST, "d0")]
    assert again.stage is Stage.WAITING
    end, actions = run(
        again,
        Continued(101, 15, True),
        Placed(Remote("p1", "d1", "remote")),
        prefill_output(),
        decode_output("last", "stop"),
    )
    assert actions == [
        SubmitPrefill("p1"),
        Emit("prefill", "first", finished=False),
        SubmitDecode("d1"),
        SendFirstToken("d1", 7),
        Emit("decode", "last", finished=True),
        DropTransfer("p1"),
    ]
    assert end.finished


def test_a_continued_answer_ends_where_the_first_would_have() -> None:
    last, _ = run(flight(), REMOTE, prefill_output(), WorkerLost("d0", LOST), Continued(101, 1, True))
    end, actions = run(last, REMOTE, prefill_output("length"))
    assert actions[-2:] == [Emit("prefill", "first", finished=True), DropTransfer("p0")]
    assert end.finished


def test_an_answer_continued_in_exact_mode_has_no_second_prefill() -> None:
    exact = flight(first_token_mode=False, wants_prompt_scores=True)
    events = (REMOTE, PrefillStarted(), prefill_output(), decode_output("a"), WorkerLost("d0", LOST))
    again, actions = run(exact, *events, Continued(101, 15, False))
    assert Emit("decode", "a", finished=False, prefill="first") in actions
    _, actions = run(again, REMOTE, PrefillStarted(), prefill_output(), decode_output("b"))
    assert actions[-1] == Emit("decode", "b", finished=False, prefill=None)
    alone, _ = run(again, REMOTE, PrefillStarted(), WorkerLost("p0", LOST))
    assert alone.stage is Stage.HANDING_OVER, "the prompt's scores are known: only the blocks are missing"


def test_an_answer_that_cannot_go_on_is_an_error() -> None:
    why = Cause("not_continuable", "it cannot")
    end, actions = run(flight(), REMOTE, prefill_output(), WorkerLost("d0", LOST), CannotContinue(why))
    assert actions[-1] == Fail(503, why)
    assert end.finished


@pytest.mark.parametrize(
    ("event", "status"),
    [(Placed(Reject(400, "too_long", "too long")), 503), (DeadlinePassed(Cause("queue_timeout", "too late")), 504)],
)
def test_an_answer_that_nobody_takes_over_names_the_worker_that_was_lost(event: Event, status: int) -> None:
    _, actions = run(flight(), REMOTE, prefill_output(), WorkerLost("d0", LOST), Continued(101, 15, True), event)
    assert isinstance(actions[-1], Fail)
    assert (actions[-1].status, actions[-1].cause.kind) == (status, LOST.kind)
    assert actions[-1].cause.message.startswith("it was lost, and no other worker took over: too l")


def test_a_failed_handover_drops_the_lease() -> None:
    _, actions = run(flight(), REMOTE, PrefillStarted(), prefill_output(), HandoverClosed("recompute"))
    assert actions[-1] == DropTransfer("p0")


def test_an_engine_that_gives_up_a_request_counts_as_lost() -> None:
    again, actions = run(flight(max_losses=2), REMOTE, PrefillStarted(), LegOutput("prefill", None, "abort", None))
    assert isinstance(actions[-1], PlaceAnew)
    assert actions[-1].lost == "p0"
    end, actions = run(again, Placed(Local("d0", "no_prefill_worker")), LegOutput("local", None, "abort", None))
    assert isinstance(actions[-1], Fail)
    assert end.finished


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), []),
        ((REMOTE,), [AbortLeg("prefill", "p0"), DropTransfer("p0")]),
        (
            (REMOTE, PrefillStarted()),
            [AbortLeg("prefill", "p0"), AbortLeg("decode", "d0"), DropTransfer("p0")],
        ),
        ((REMOTE, PrefillStarted(), prefill_output()), [AbortLeg("decode", "d0"), DropTransfer("p0")]),
        (
            (REMOTE, PrefillStarted(), prefill_output(), HandoverClosed("loaded")),
            [AbortLeg("decode", "d0")],
        ),
        ((Placed(Local("d0", "short_prompt")),), [AbortLeg("local", "d0")]),
        ((Placed(PrefillOnly("p0", "single_token")),), [AbortLeg("local", "p0")]),
    ],
)
def test_an_abort_ends_every_leg_wherever_the_request_is(events: tuple[Event, ...], expected: list[Action]) -> None:
    before, _ = run(flight(), *events)
    end, actions = run(before, Aborted())
    assert actions == expected
    assert end.finished


def test_streamed_input_goes_on_after_a_turn_has_finished() -> None:
    talking, actions = run(
        flight(open_ended=True), Placed(Local("d0", "not_transferable")), LegOutput("local", 1, "stop", "turn")
    )
    assert actions[-1] == Emit("local", "turn", finished=False)
    assert talking.stage is Stage.LOCAL


def test_streamed_input_cannot_start_over_even_unseen() -> None:
    _, actions = run(flight(streamed=True), Placed(Local("d0", "not_transferable")), WorkerLost("d0", LOST))
    assert actions[-1] == Continue(LOST, "d0")


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((REMOTE,), Continued(101, 15, True)),
        ((REMOTE, prefill_output()), CannotContinue(LOST)),
        ((Placed(Local("d0", "short_prompt")),), Continued(101, 15, True)),
        ((), PrefillStarted()),
        ((), HandoverClosed("loaded")),
        ((), decode_output()),
        ((REMOTE,), REMOTE),
        ((REMOTE,), decode_output()),
        ((REMOTE,), LegOutput("local", 1, None, None)),
        ((REMOTE, prefill_output()), prefill_output()),
        ((REMOTE, prefill_output(), HandoverClosed("loaded")), HandoverClosed("loaded")),
        ((Placed(Local("d0", "short_prompt")),), PrefillStarted()),
        ((Placed(Local("d0", "short_prompt")),), decode_output()),
    ],
)
def test_what_cannot_happen_is_named(before: tuple[Event, ...], event: Event) -> None:
    start, _ = run(flight(), *before)
    with pytest.raises(IllegalTransition, match=f"{type(event).__name__} .* {start.stage.value}"):
        advance(start, event)


def test_events_after_the_end_mean_nothing() -> None:
    end, _ = run(flight(), Aborted())
    for event in (PrefillStarted(), prefill_output(), decode_output(), HandoverClosed("loaded"), Aborted()):
        assert advance(end, event).actions == ()
