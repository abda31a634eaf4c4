"""The state machine of one request, alone and under every interleaving hypothesis can think of."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.flights.actions import (
    AbortLeg,
    Action,
    DropTransfer,
    Emit,
    Fail,
    PlaceAnew,
    SendFirstToken,
    SubmitDecode,
    SubmitLocal,
    SubmitPrefill,
)
from proxy.flights.events import (
    Aborted,
    Cause,
    DeadlinePassed,
    Event,
    HandoverClosed,
    LegOutput,
    Placed,
    PrefillStarted,
    WorkerLost,
)
from proxy.flights.flight import Flight, IllegalTransition, Stage, Step, advance, passes_on
from proxy.scheduling.place import Local, PrefillOnly, Reject, Remote, Wait

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


def test_a_prefill_worker_lost_before_the_first_token_is_replaced_once() -> None:
    again, actions = run(flight(), REMOTE, PrefillStarted(), WorkerLost("p0", LOST))
    assert actions[2:] == [AbortLeg("decode", "d0"), PlaceAnew(LOST)]
    assert again.stage is Stage.WAITING
    failed, actions = run(again, Placed(Remote("p1", "d0", "remote")), WorkerLost("p1", LOST))
    assert actions == [SubmitPrefill("p1"), Fail(503, LOST)]
    assert failed.finished


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
    assert actions[-1] == PlaceAnew(LOST)
    assert again.stage is Stage.WAITING


def test_a_decode_worker_lost_during_the_prefill_is_replaced() -> None:
    again, actions = run(flight(), REMOTE, PrefillStarted(), WorkerLost("d0", LOST))
    assert actions[2:] == [AbortLeg("prefill", "p0"), DropTransfer("p0"), PlaceAnew(LOST)]
    assert again.stage is Stage.WAITING


def test_a_decode_worker_lost_after_the_first_token_fails_the_request_and_drops_the_lease() -> None:
    end, actions = run(flight(), REMOTE, PrefillStarted(), prefill_output(), WorkerLost("d0", LOST))
    assert actions[4:] == [DropTransfer("p0"), Fail(503, LOST)]
    assert end.finished


def test_a_failed_handover_drops_the_lease() -> None:
    _, actions = run(flight(), REMOTE, PrefillStarted(), prefill_output(), HandoverClosed("recompute"))
    assert actions[-1] == DropTransfer("p0")


def test_an_engine_that_gives_up_a_request_counts_as_lost() -> None:
    again, actions = run(flight(), REMOTE, PrefillStarted(), LegOutput("prefill", None, "abort", None))
    assert isinstance(actions[-1], PlaceAnew)
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


@pytest.mark.parametrize(
    ("before", "event"),
    [
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


# ---------------------------------------------------------------------------------------------------- interleavings


@dataclass
class World:
    """Two prefill and two decode workers that do what flights ask for, in any order, and may die."""

    flight: Flight
    workers: set[str] = field(default_factory=lambda: {"p0", "p1", "d0", "d1"})
    legs: dict[str, str] = field(default_factory=dict)
    lease_at: str = ""
    started: bool = False
    closed: bool = False
    must_place: bool = True
    ends: list[str] = field(default_factory=list)
    emitted: list[str] = field(default_factory=list)
    replaced: int = 0
    outputs: int = 0

    def enabled(self) -> list[Event]:
        """Everything that may happen next."""
        if self.flight.finished:
            return []
        events: list[Event] = [Aborted()]
        events += [WorkerLost(worker, LOST) for worker in sorted(self.workers)]
        if self.must_place:
            events += self._placements()
            if self.flight.stage is Stage.WAITING:
                events.append(DeadlinePassed(Cause("queue_timeout", "too late")))
        if "prefill" in self.legs:
            if not self.started:
                events.append(PrefillStarted())
            events += [prefill_output(finish) for finish in ("length", "stop", "error")]
            events.append(LegOutput("prefill", None, "abort", None))
        for leg in ("decode", "local"):
            if leg in self.legs:
                name = f"{leg}{self.outputs}"
                kind: Any = leg
                events += [LegOutput(kind, 9, finish, name) for finish in (None, "stop", "length", "error")]
                events.append(LegOutput(kind, None, "abort", None))
        if "decode" in self.legs and not self.closed:
            events += [HandoverClosed("loaded"), HandoverClosed("recompute")]
        return events

    def _placements(self) -> list[Event]:
        prefills = sorted(w for w in self.workers if w[0] == "p")
        decodes = sorted(w for w in self.workers if w[0] == "d")
        events: list[Event] = [Placed(Reject(503, "no_decode_worker", "nobody")), Placed(Wait("no_prefill_worker"))]
        events += [Placed(Local(d, "short_prompt")) for d in decodes]
        events += [Placed(Remote(p, d, "remote")) for p in prefills for d in decodes]
        return events

    def happen(self, event: Event) -> None:
        match event:
            case Placed(Wait()):
                pass
            case Placed():
                self.must_place = False
            case PrefillStarted():
                self.started = True
            case HandoverClosed(outcome):
                self.closed = True
                if outcome == "loaded":
                    self.lease_at = ""
            case LegOutput(leg, _, finish, _):
                self.outputs += 1
                if finish is not None:
                    self.legs.pop(leg, None)
            case WorkerLost(worker, _):
                self.workers.discard(worker)
                self.legs = {leg: at for leg, at in self.legs.items() if at != worker}
                if self.lease_at == worker:
                    self.lease_at = ""
            case Aborted():
                self.ends.append("aborted")
            case DeadlinePassed():
                pass
        step = advance(self.flight, event)
        self.flight = step.flight
        for action in step.actions:
            self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case SubmitPrefill(worker):
                assert worker in self.workers
                assert "prefill" not in self.legs
                self.legs["prefill"], self.lease_at = worker, worker
                self.started = self.closed = False
            case SubmitDecode(worker):
                assert worker in self.workers
                assert "decode" not in self.legs
                self.legs["decode"] = worker
            case SubmitLocal(worker):
                assert worker in self.workers
                assert not self.legs
                self.legs["local"] = worker
            case AbortLeg(leg, worker):
                assert self.legs.pop(leg) == worker
            case DropTransfer(worker):
                assert worker in self.workers
                self.lease_at = ""
            case SendFirstToken(worker, token):
                assert self.legs["decode"] == worker
                assert token == 7
            case Emit(_, payload, finished, _):
                assert not self.ends, "nothing is emitted after the end"
                self.emitted.append(payload)
                if finished:
                    self.ends.append("emitted")
            case Fail():
                self.ends.append("failed")
            case PlaceAnew():
                assert not self.emitted, "what the client has seen cannot be started over"
                self.replaced += 1
                self.must_place = True

    def check(self) -> None:
        assert len(self.ends) <= 1, f"ended twice: {self.ends}"
        assert self.replaced <= 1
        assert self.flight.finished == bool(self.ends)
        if self.flight.finished:
            assert not self.legs, f"orphans: {self.legs}"
            assert not self.lease_at, "the lease was neither dropped nor consumed"
        leg = passes_on(self.flight)
        if leg is not None:
            passed = Step(self.flight, (Emit(leg, "any", finished=False),))
            assert advance(self.flight, LegOutput(leg, 9, None, "any")) == passed, "outputs may skip `advance` here"
        decoded = [int(p.removeprefix("decode")) for p in self.emitted if p.startswith("decode")]
        assert decoded == sorted(decoded)
        if self.flight.first_token_mode and decoded:
            assert self.emitted[0] == "first", "the first token comes first"


FLIGHTS = st.builds(
    flight,
    first_token_mode=st.booleans(),
    wants_prompt_scores=st.booleans(),
    reserve_at_start=st.booleans(),
    num_prompt_tokens=st.sampled_from([1, 100, 999]),
)


@settings(max_examples=400, deadline=None)
@given(start=FLIGHTS, choices=st.lists(st.integers(0, 10_000), max_size=25))
def test_every_interleaving_ends_once_and_leaves_nothing_behind(start: Flight, choices: list[int]) -> None:
    world = World(start)
    for choice in choices:
        events = world.enabled()
        if not events:
            break
        # Half of the time the request goes on, or it would rarely get far.
        calm = [e for e in events if not isinstance(e, WorkerLost | Aborted | DeadlinePassed)]
        world.happen(
            (calm or events)[choice // 2 % len(calm or events)] if choice % 2 else events[choice % len(events)]
        )
        world.check()
    finish(world)


def finish(world: World) -> None:
    """From wherever it is, a request that is left alone comes to its end."""
    for _ in range(20):
        if world.flight.finished:
            return
        events = world.enabled()
        outputs = [e for e in events if isinstance(e, LegOutput) and e.finish in ("stop", "length")]
        steps = [e for e in events if isinstance(e, Placed | PrefillStarted)]
        going = [e for e in steps if not (isinstance(e, Placed) and isinstance(e.placement, Wait))]
        ends: list[Event] = [*outputs, *going]
        assert ends, f"stuck in {world.flight}"
        world.happen(ends[0])
        world.check()
    raise AssertionError(f"did not end: {world.flight}")


def test_events_after_the_end_mean_nothing() -> None:
    end, _ = run(flight(), Aborted())
    for event in (PrefillStarted(), prefill_output(), decode_output(), HandoverClosed("loaded"), Aborted()):
        assert advance(end, event).actions == ()
