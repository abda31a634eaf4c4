"""The legs of one request, as a pure state machine: events in, actions out.

Nothing here sends, waits or reads a clock. `advance` takes a flight and what happened to it, and returns the flight
as it is afterwards with what must be done. An event that cannot happen in a stage raises `IllegalTransition`.

    WAITING       nobody works on it: in the proxy's queue, or behind the sibling that fetches the prompt for it. Also
                  after a loss: it starts over, or goes on where the client's tokens end
    PREFILLING    the prefill leg runs; the decode leg may have been submitted to reserve its blocks
    HANDING_OVER  the prefill leg has ended; blocks may still be moving
    DECODING      the decode worker has the blocks, or recomputes them
    LOCAL         one worker does everything
    FINISHED      nothing is left anywhere
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

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
from proxy.flights.causes import after_loss, gave_up, no_token, too_often
from proxy.flights.events import (
    Aborted,
    CannotContinue,
    Cause,
    Continued,
    DeadlinePassed,
    Event,
    Finish,
    HandoverClosed,
    LegKind,
    LegOutput,
    Placed,
    PrefillStarted,
    WorkerLost,
)
from proxy.scheduling.place import Local, Placement, PrefillOnly, Reject, Remote, Wait


class Stage(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"
    DECODING = "decoding"
    LOCAL = "local"
    FINISHED = "finished"


class IllegalTransition(Exception):
    """An event reached a flight in a stage where it cannot happen: a fault of the proxy or of a worker."""

    def __init__(self, stage: Stage, event: Event) -> None:
        super().__init__(f"{type(event).__name__} cannot happen to a request in stage {stage.value}")


@dataclass(frozen=True, slots=True)
class Flight:
    """Where one request stands."""

    num_prompt_tokens: int
    max_tokens: int
    max_model_len: int
    """Of every worker it may run on."""
    first_token_mode: bool
    wants_prompt_scores: bool
    reserve_at_start: bool
    """Submit the decode leg when the prefill starts, not when it has ended."""
    open_ended: bool = False
    """Streamed input: an output's finish reason ends a turn, not the request."""
    streamed: bool = False
    """The input came in pieces, which are not kept: it cannot start over."""
    max_losses: int = 3
    """So many workers lost in a row without one new token in between, and it fails."""

    stage: Stage = Stage.WAITING
    prefill: str = ""
    """Worker of the prefill leg."""
    decode: str = ""
    """Worker of the decode leg, or of the only leg (LOCAL)."""
    prefill_running: bool = False
    decode_submitted: bool = False
    decode_running: bool = False
    handover_closed: bool = False
    lease_open: bool = False
    """The prefill worker may hold blocks for us; whoever ends the flight must drop or consume them."""
    emitted: bool = False
    """The client has seen something of it: from here on it cannot start over, only be continued."""
    progressed: bool = False
    """The client got a token since it was placed last."""
    losses: int = 0
    """Workers lost in a row without a new token; those that had nothing of it yet do not count."""
    lost: Cause | None = None
    """Why it was taken from its workers last."""
    held: tuple[LegOutput, ...] = ()
    """Decode outputs that overtook the prefill output."""
    prefill_payload: Any = None
    """Exact mode: the prefill output, until the first decode output takes it along."""

    @property
    def finished(self) -> bool:
        return self.stage is Stage.FINISHED


@dataclass(frozen=True, slots=True)
class Step:
    """The flight after an event, and what must be done now, in this order."""

    flight: Flight
    actions: tuple[Action, ...] = ()


def advance(flight: Flight, event: Event) -> Step:
    """What `event` means to `flight`. Raises `IllegalTransition`."""
    match flight.stage:
        case Stage.WAITING:
            return _in_waiting(flight, event)
        case Stage.PREFILLING:
            return _in_prefilling(flight, event)
        case Stage.HANDING_OVER | Stage.DECODING:
            return _in_decode(flight, event)
        case Stage.LOCAL:
            return _in_local(flight, event)
        case Stage.FINISHED:
            # Whatever was on its way when the flight ended.
            return Step(flight)


def passes_on(flight: Flight) -> LegKind | None:
    """The leg whose outputs change nothing as long as none is the last: each is given to the client, and that is all.

    None while every output has to be looked at. For most tokens this spares `advance`, which would say the same.
    """
    if not flight.progressed or flight.prefill_payload is not None:
        return None
    match flight.stage:
        case Stage.HANDING_OVER | Stage.DECODING:
            return "decode"
        case Stage.LOCAL:
            return "local"
        case _:
            return None


def _in_waiting(flight: Flight, event: Event) -> Step:
    match event:
        case Placed(placement):
            return _placed(flight, placement)
        case Continued(num_prompt_tokens, max_tokens, first_token_mode):
            rest = replace(
                flight,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                first_token_mode=first_token_mode,
                wants_prompt_scores=False,  # they went out with the first output
            )
            return Step(rest)
        case CannotContinue(cause):
            return _end(flight, Fail(503, cause))
        case Aborted():
            return _end(flight)
        case DeadlinePassed(cause):
            return _end(flight, Fail(504, after_loss(flight.lost, cause)))
        case WorkerLost():
            return Step(flight)
        case PrefillStarted() | LegOutput() | HandoverClosed():
            raise IllegalTransition(flight.stage, event)


def _placed(flight: Flight, placement: Placement) -> Step:
    match placement:
        case Remote(prefill, decode, _):
            moved = replace(
                flight,
                stage=Stage.PREFILLING,
                prefill=prefill,
                decode=decode,
                prefill_running=True,
                lease_open=True,
            )
            return Step(moved, (SubmitPrefill(prefill),))
        case PrefillOnly(worker, _) | Local(worker, _):
            return Step(replace(flight, stage=Stage.LOCAL, decode=worker), (SubmitLocal(worker),))
        case Wait():
            return Step(flight)
        case Reject(status, reason, message, retry_after_s):
            # What was accepted once is no fault of the client's now.
            status = 503 if flight.lost is not None else status
            return _end(flight, Fail(status, after_loss(flight.lost, Cause(reason, message, retry_after_s))))


def _in_prefilling(flight: Flight, event: Event) -> Step:
    match event:
        case PrefillStarted():
            if flight.decode_submitted or not flight.reserve_at_start:
                return Step(flight)
            submitted = replace(flight, decode_submitted=True, decode_running=True)
            return Step(submitted, (SubmitDecode(flight.decode),))
        case LegOutput("prefill"):
            return _prefill_output(flight, event)
        case LegOutput("decode") if flight.decode_submitted:
            if event.finish == "abort":
                return _decode_lost(flight, gave_up(flight.decode))
            running = flight.decode_running and event.finish is None
            return Step(replace(flight, held=(*flight.held, event), decode_running=running))
        case HandoverClosed(outcome) if flight.decode_submitted:
            consumed = outcome == "loaded"
            return Step(replace(flight, handover_closed=True, lease_open=flight.lease_open and not consumed))
        case WorkerLost(worker, cause):
            if worker == flight.prefill:
                gone = replace(flight, prefill="", prefill_running=False, lease_open=False)
                return _prefill_lost(gone, worker, cause)
            if worker == flight.decode and not _decode_ended(flight):
                return _decode_lost(flight, cause)
            return Step(flight)
        case Aborted():
            return _end(flight)
        case DeadlinePassed(cause):
            return _end(flight, Fail(504, cause))
        case Placed() | Continued() | CannotContinue() | LegOutput() | HandoverClosed():
            raise IllegalTransition(flight.stage, event)


def _prefill_output(flight: Flight, output: LegOutput) -> Step:
    if output.finish == "abort":
        return _prefill_lost(replace(flight, prefill_running=False), flight.prefill, gave_up(flight.prefill))
    # The prefill leg has ended by itself: from here on there is nothing to abort, only a lease.
    # What it knows of the prompt went out with the first output, if there was one.
    knows = None if flight.emitted else output.payload
    ended = replace(flight, prefill_running=False, prefill_payload=knows, stage=_after_prefill(flight))
    if output.finish == "error" or (flight.first_token_mode and _ends_request(flight, output.finish)):
        return _end(ended, Emit("prefill", output.payload, finished=True))
    if output.token is None:
        return _end(ended, Fail(500, no_token(flight.prefill)))
    actions: list[Action] = []
    if flight.first_token_mode:
        actions.append(Emit("prefill", output.payload, finished=False))
        ended = replace(ended, emitted=True, progressed=True, prefill_payload=None)
    if not flight.decode_submitted:
        actions.append(SubmitDecode(flight.decode))
        ended = replace(ended, decode_submitted=True, decode_running=True)
    if flight.first_token_mode and not flight.held:
        actions.append(SendFirstToken(flight.decode, output.token))
    if flight.handover_closed and flight.lease_open:
        actions.append(DropTransfer(flight.prefill))
        ended = replace(ended, lease_open=False)
    return _release_held(ended, actions)


def _after_prefill(flight: Flight) -> Stage:
    return Stage.DECODING if flight.handover_closed else Stage.HANDING_OVER


def _ends_request(flight: Flight, finish: Finish | None) -> bool:
    """Whether the prefill worker's token is the last one. Its `length` is ours: it runs with `max_tokens=1`."""
    if finish == "length":
        return flight.max_tokens <= 1 or flight.num_prompt_tokens + 1 >= flight.max_model_len
    return finish is not None


def _release_held(flight: Flight, actions: list[Action]) -> Step:
    """Emits what the decode worker sent before the prefill output was here."""
    held, flight = flight.held, replace(flight, held=())
    for output in held:
        step = _decode_output(flight, output)
        flight = step.flight
        actions.extend(step.actions)
    return Step(flight, tuple(actions))


def _prefill_lost(flight: Flight, worker: str, cause: Cause) -> Step:
    """Before the prefill output. In exact mode the decode worker can go on alone: it has the whole prompt."""
    if flight.decode_submitted and not flight.first_token_mode and not flight.wants_prompt_scores:
        return _release_held(replace(flight, stage=_after_prefill(flight)), [])
    return _lost(flight, worker, cause)


def _decode_lost(flight: Flight, cause: Cause) -> Step:
    gone = replace(flight, decode_running=False, decode="")
    return _lost(gone, flight.decode, cause, was_at_work=flight.decode_submitted)


def _decode_ended(flight: Flight) -> bool:
    """Whether the decode worker has answered everything already, and only the first token is missing."""
    return flight.decode_submitted and not flight.decode_running


def _in_decode(flight: Flight, event: Event) -> Step:
    match event:
        case LegOutput("decode"):
            return _decode_output(flight, event)
        case HandoverClosed(outcome) if flight.stage is Stage.HANDING_OVER:
            closed = replace(flight, stage=Stage.DECODING, handover_closed=True, lease_open=False)
            if outcome == "loaded" or not flight.lease_open:
                return Step(closed)
            return Step(closed, (DropTransfer(flight.prefill),))
        case WorkerLost(worker, cause):
            if worker == flight.decode:
                return _decode_lost(flight, cause)
            if worker == flight.prefill:
                # Nothing to do for the client: the decode worker recomputes what it lacks.
                return Step(replace(flight, prefill="", lease_open=False))
            return Step(flight)
        case Aborted():
            return _end(flight)
        case DeadlinePassed(cause):
            return _end(flight, Fail(504, cause))
        case PrefillStarted():
            return Step(flight)
        case Placed() | Continued() | CannotContinue() | LegOutput() | HandoverClosed():
            raise IllegalTransition(flight.stage, event)


def _decode_output(flight: Flight, output: LegOutput) -> Step:
    if output.finish == "abort":
        return _decode_lost(flight, gave_up(flight.decode))
    emit = Emit("decode", output.payload, output.finish is not None, flight.prefill_payload)
    if output.finish is not None:
        return _end(replace(flight, decode_running=False), emit)
    return Step(_seen(flight, output), (emit,))


def _seen(flight: Flight, output: LegOutput) -> Flight:
    """After the client has got an output that is not the last."""
    if flight.progressed and flight.prefill_payload is None:
        return flight
    progressed = flight.progressed or output.token is not None
    return replace(flight, emitted=True, progressed=progressed, prefill_payload=None)


def _in_local(flight: Flight, event: Event) -> Step:
    match event:
        case LegOutput("local"):
            if event.finish == "abort":
                return _lost(replace(flight, decode=""), flight.decode, gave_up(flight.decode))
            if event.finish is not None and not flight.open_ended:
                return _end(replace(flight, decode=""), Emit("local", event.payload, finished=True))
            emit = Emit("local", event.payload, finished=False)
            return Step(_seen(flight, event), (emit,))
        case WorkerLost(worker, cause):
            return _lost(replace(flight, decode=""), worker, cause) if worker == flight.decode else Step(flight)
        case Aborted():
            return _end(flight)
        case DeadlinePassed(cause):
            return _end(flight, Fail(504, cause))
        case Placed() | Continued() | CannotContinue() | PrefillStarted() | LegOutput() | HandoverClosed():
            raise IllegalTransition(flight.stage, event)


def _lost(flight: Flight, worker: str, cause: Cause, was_at_work: bool = True) -> Step:
    """A leg is lost: clean up the other one, then start over if the client saw nothing yet, or go on elsewhere."""
    cleanup = _cleanup(flight)
    losses = (0 if flight.progressed else flight.losses) + was_at_work
    if losses >= flight.max_losses:
        return Step(replace(_cleared(flight), stage=Stage.FINISHED), (*cleanup, Fail(503, too_often(cause, losses))))
    again = replace(_cleared(flight), stage=Stage.WAITING, progressed=False, losses=losses, lost=cause)
    seen = flight.emitted or flight.streamed
    return Step(again, (*cleanup, Continue(cause, worker) if seen else PlaceAnew(cause, worker)))


def _end(flight: Flight, *last: Action) -> Step:
    return Step(replace(_cleared(flight), stage=Stage.FINISHED), (*last, *_cleanup(flight)))


def _cleanup(flight: Flight) -> tuple[Action, ...]:
    """Ends every leg that still runs and gives up the lease."""
    actions: list[Action] = []
    if flight.stage is Stage.LOCAL and flight.decode:
        actions.append(AbortLeg("local", flight.decode))
    if flight.prefill_running:
        actions.append(AbortLeg("prefill", flight.prefill))
    if flight.decode_running:
        actions.append(AbortLeg("decode", flight.decode))
    if flight.lease_open and flight.prefill:
        actions.append(DropTransfer(flight.prefill))
    return tuple(actions)


def _cleared(flight: Flight) -> Flight:
    return replace(
        flight,
        prefill="",
        decode="",
        prefill_running=False,
        decode_submitted=False,
        decode_running=False,
        handover_closed=False,
        lease_open=False,
        held=(),
        prefill_payload=None,
    )
