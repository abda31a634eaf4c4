"""A request, its workers and their deaths in every order: no token twice, none missing, one end, nothing left over."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    SubmitLocal,
    SubmitPrefill,
)
from proxy.flights.events import (
    Aborted,
    CannotContinue,
    Cause,
    Continued,
    DeadlinePassed,
    Event,
    Finish,
    HandoverClosed,
    LegOutput,
    Placed,
    PrefillStarted,
    WorkerLost,
)
from proxy.flights.flight import Flight, Stage, Step
from proxy.flights.transitions import advance, passes_on
from proxy.scheduling.place import Local, PrefillOnly, Reject, Remote, Wait

LOST = Cause("silent", "it was lost")
DROPPED_TOKEN = -1
PROMPT = 100


@dataclass(frozen=True)
class WorkerBack:
    """A lost worker has been restarted."""

    worker: str


@dataclass
class World:
    """Workers that do what a flight asks for, in any order, and may die. Token number n of the answer is n."""

    flight: Flight
    length: int
    """Of the answer; a stop token is its last, unless `max_tokens` ends it."""
    max_tokens: int
    can_continue: bool = True
    becomes_first_token_mode: bool = False
    """What forced exact mode has been satisfied by the time it is continued (`min_tokens`)."""
    workers: frozenset[str] = frozenset({"p0", "d0"})
    dead: frozenset[str] = frozenset()
    may_come_back: bool = False
    legs: dict[str, str] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    """By leg, the number of the token it makes next."""
    lease_at: str = ""
    started: bool = False
    closed: bool = False
    must_place: bool = True
    told: bool = False
    """The decode worker was sent the first token."""
    sent: tuple[int, ...] = ()
    prefills_seen: int = 0
    progressed: bool = False
    losses: int = 0
    was_at_work: bool = False
    """The worker that was lost last had a leg of it."""
    ends: tuple[str, ...] = ()

    def copy(self) -> "World":
        return replace(self, legs=dict(self.legs), made=dict(self.made))

    def key(self) -> Any:
        values = (getattr(self, f.name) for f in fields(self))
        return tuple(tuple(sorted(v.items())) if isinstance(v, dict) else v for v in values)

    # ------------------------------------------------------------------------------------------- what may happen

    def enabled(self) -> Iterator[Event | WorkerBack]:
        """Everything that may happen next."""
        if self.flight.finished:
            return
        yield Aborted()
        for worker in sorted(self.workers):
            yield WorkerLost(worker, LOST)
        if self.may_come_back:
            for worker in sorted(self.dead):
                yield WorkerBack(worker)
        yield from self.steps()

    def steps(self) -> Iterator[Event]:
        """What happens when nothing goes wrong, and engines that give up."""
        if self.must_place:
            yield from self._placements()
            return
        if "prefill" in self.legs:
            if not self.started:
                yield PrefillStarted()
            yield self._prefill_output()
            yield LegOutput("prefill", None, "abort", None)
        if "decode" in self.legs:
            yield from self._outputs("decode")
            if not self.closed:
                yield from (HandoverClosed("loaded"), HandoverClosed("recompute"))
        if "local" in self.legs:
            yield from self._outputs("local")

    def _prefill_output(self) -> LegOutput:
        token = self.made["prefill"]
        if not self.flight.first_token_mode:
            return LegOutput("prefill", DROPPED_TOKEN, "length", (DROPPED_TOKEN,))
        return LegOutput("prefill", token, "stop" if self._stops(token) else "length", (token,))

    def _outputs(self, leg: Any) -> Iterator[LegOutput]:
        first = self.made[leg]
        for count in (1, 2):
            tokens = tuple(range(first, first + count))
            if tokens[-1] < self.length:
                yield LegOutput(leg, first, self._finish(tokens[-1]), tokens)
        yield LegOutput(leg, None, "abort", None)

    def _stops(self, token: int) -> bool:
        return token == self.length - 1 and self.length < self.max_tokens

    def _finish(self, token: int) -> Finish | None:
        if token < self.length - 1:
            return None
        return "stop" if self._stops(token) else "length"

    def _placements(self) -> Iterator[Event]:
        prefills = sorted(w for w in self.workers if w[0] == "p")
        decodes = sorted(w for w in self.workers if w[0] == "d")
        yield Placed(Reject(503, "no_decode_worker", "nobody"))
        yield DeadlinePassed(Cause("queue_timeout", "too late"))
        if self.max_tokens - len(self.sent) == 1:
            yield from (Placed(PrefillOnly(p, "single_token")) for p in prefills)
        yield from (Placed(Remote(p, d, "remote")) for p in prefills for d in decodes)
        yield from (Placed(Local(d, "short_prompt")) for d in decodes)

    # ---------------------------------------------------------------------------------------------- what happens

    def happen(self, event: Event | WorkerBack) -> None:
        match event:
            case WorkerBack(worker):
                self.workers, self.dead = self.workers | {worker}, self.dead - {worker}
                return
            case Placed(Wait()):
                pass
            case Placed():
                self.must_place = self.progressed = False
            case PrefillStarted():
                self.started = True
            case HandoverClosed(outcome):
                self.closed = True
                if outcome == "loaded":
                    self.lease_at = ""
            case LegOutput(leg, token, finish, tokens):
                self.was_at_work = True
                if finish is not None:
                    self.legs.pop(leg)
                if token is not None:
                    self.made[leg] += len(tokens)
            case WorkerLost(worker, _):
                self.was_at_work = worker in self.legs.values()
                self.workers, self.dead = self.workers - {worker}, self.dead | {worker}
                self.legs = {leg: at for leg, at in self.legs.items() if at != worker}
                if self.lease_at == worker:
                    self.lease_at = ""
            case Aborted():
                self.ends = (*self.ends, "aborted")
        self.feed(event)
        self.check()

    def feed(self, event: Event) -> None:
        step = advance(self.flight, event)
        self.flight = step.flight
        for action in step.actions:
            self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case SubmitPrefill(worker):
                assert "prefill" not in self.legs
                self.submit("prefill", worker, len(self.sent))
                self.lease_at, self.started, self.closed, self.told = worker, False, False, False
            case SubmitDecode(worker):
                assert self.lease_at or self.flight.stage is not Stage.PREFILLING
                self.submit("decode", worker, self.made["prefill"] if "prefill" in self.legs else len(self.sent))
                if self.flight.first_token_mode and "prefill" in self.legs:
                    self.made["decode"] += 1
            case SubmitLocal(worker):
                assert not self.legs
                self.submit("local", worker, len(self.sent))
            case AbortLeg(leg, worker):
                assert self.legs.pop(leg) == worker, "a leg is aborted once, where it is"
            case DropTransfer(worker):
                assert self.lease_at == worker, "a lease is dropped once, unless its blocks were fetched"
                self.lease_at = ""
            case SendFirstToken(worker, token):
                assert self.legs["decode"] == worker
                assert token == self.sent[-1]
                assert not self.told
                self.told = True
            case Emit(_, payload, finished, prefill):
                self.emit(payload, finished, prefill)
            case PlaceAnew():
                assert not self.sent, "what the client has seen cannot be started over"
                self.lose()
            case Continue():
                assert self.sent
                self.lose()
                self.answer_continue()
            case Fail(_, cause):
                self.ends = (*self.ends, "failed")
                if "max_losses" in cause.message:
                    self.count_loss()
                    assert self.losses == self.flight.max_losses

    def submit(self, leg: str, worker: str, token: int) -> None:
        assert worker in self.workers
        self.legs[leg], self.made[leg] = worker, token

    def emit(self, tokens: tuple[int, ...], finished: bool, prefill: Any) -> None:
        assert not self.ends, "nothing is emitted after the end"
        if prefill is not None:
            assert not self.sent, "what the prefill knew goes out with the first output"
            self.prefills_seen += 1
        self.sent, self.progressed = (*self.sent, *tokens), True
        assert self.sent == tuple(range(len(self.sent))), f"a token twice or missing: {self.sent}"
        if finished:
            assert len(self.sent) == self.length, "the answer ends where an undisturbed one does"
            self.ends = (*self.ends, "emitted")

    def lose(self) -> None:
        assert not self.legs, "nothing of the earlier life runs on"
        assert not self.lease_at
        self.count_loss()
        assert self.losses < self.flight.max_losses
        self.must_place = True

    def count_loss(self) -> None:
        self.losses = (0 if self.progressed else self.losses) + self.was_at_work

    def answer_continue(self) -> None:
        if not self.can_continue:
            self.feed(CannotContinue(Cause("not_continuable", "it remembers")))
            return
        first_token_mode = self.flight.first_token_mode or self.becomes_first_token_mode
        self.feed(Continued(PROMPT + len(self.sent), self.max_tokens - len(self.sent), first_token_mode))

    def check(self) -> None:
        assert len(self.ends) <= 1, f"ended twice: {self.ends}"
        assert self.flight.finished == bool(self.ends)
        assert self.prefills_seen <= 1
        if (leg := passes_on(self.flight)) is not None:
            passed = Step(self.flight, (Emit(leg, "any", finished=False),))
            assert advance(self.flight, LegOutput(leg, 9, None, "any")) == passed, "outputs may skip `advance` here"
        if self.flight.finished:
            assert not self.legs, f"orphans: {self.legs}"
            assert not self.lease_at, "the lease was neither dropped nor consumed"


def world(
    first_token_mode: bool, length: int, max_tokens: int, max_losses: int, reserve_at_start: bool = True, **changes: Any
) -> World:
    flight = Flight(
        num_prompt_tokens=PROMPT,
        max_tokens=max_tokens,
        max_model_len=1000,
        first_token_mode=first_token_mode,
        wants_prompt_scores=bool(changes.pop("wants_prompt_scores", False)),
        reserve_at_start=reserve_at_start,
        max_losses=max_losses,
    )
    return World(flight, length, max_tokens, **changes)


def explore(start: World, most: int = 10_000) -> list[World]:
    """Visits every situation that can follow and returns them."""
    seen, todo = {start.key(): start}, [start]
    while todo:
        here = todo.pop()
        assert here.flight.finished or any(here.steps()), f"stuck in {here.flight}"
        for event in here.enabled():
            there = here.copy()
            there.happen(event)
            if (key := there.key()) not in seen:
                seen[key] = there
                todo.append(there)
        assert len(seen) <= most, "too many situations for a test"
    return list(seen.values())


MODES: list[dict[str, Any]] = [
    {"first_token_mode": True},
    {"first_token_mode": True, "reserve_at_start": False},
    {"first_token_mode": False},
    {"first_token_mode": False, "reserve_at_start": False, "becomes_first_token_mode": True},
    {"first_token_mode": False, "wants_prompt_scores": True},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_with_losses_in_every_order_the_tokens_are_those_of_an_undisturbed_answer(mode: dict[str, Any]) -> None:
    situations = explore(world(length=2, max_tokens=3, max_losses=2, may_come_back=True, **mode))
    answered = [s for s in situations if s.ends == ("emitted",)]
    assert any(s.losses > 0 for s in answered), "some were answered after losses"
    assert any(s.ends == ("failed",) for s in situations)


@pytest.mark.parametrize("first_token_mode", [True, False])
def test_answers_that_max_tokens_ends_are_as_long_as_undisturbed_ones(first_token_mode: bool) -> None:
    situations = explore(world(first_token_mode, length=2, max_tokens=2, max_losses=2))
    assert any(s.ends == ("emitted",) and s.losses > 0 for s in situations)


def test_what_cannot_be_continued_starts_over_unseen_and_fails_once_seen() -> None:
    situations = explore(world(True, length=2, max_tokens=3, max_losses=3, can_continue=False))
    assert any(s.ends == ("emitted",) and s.losses for s in situations), "started over unseen"
    assert any(s.ends == ("failed",) and s.sent for s in situations), "failed once seen"


@settings(max_examples=100)
@given(
    start=st.builds(
        world,
        first_token_mode=st.booleans(),
        reserve_at_start=st.booleans(),
        wants_prompt_scores=st.booleans(),
        becomes_first_token_mode=st.booleans(),
        length=st.sampled_from([6, 8]),
        max_tokens=st.sampled_from([8, 9]),
        max_losses=st.integers(1, 3),
        workers=st.just(frozenset({"p0", "p1", "d0", "d1"})),
        may_come_back=st.just(True),
    ),
    choices=st.lists(st.integers(0, 10_000), max_size=50),
)
def test_longer_answers_on_more_workers_are_the_same(start: World, choices: list[int]) -> None:
    for choice in choices:
        events = list(start.enabled())
        if not events:
            return
        # Half of the time the request goes on, or it would rarely get far.
        calm = [e for e in start.steps() if not isinstance(e, DeadlinePassed) and getattr(e, "finish", "") != "abort"]
        among = calm if choice % 2 and calm else events
        start.happen(among[choice // 2 % len(among)])
