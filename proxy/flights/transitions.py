"""The flight of one request, as a pure state machine: events in, actions out.

Nothing here sends, waits or reads a clock. `advance` takes a flight and what happened to it, and returns the flight as
it is afterwards with what must be done. An event that cannot happen in a stage raises `IllegalTransition`. While one
worker at most is concerned, it is decided here; with two of them in `handover.py`; how a flight ends, or loses its
workers, in `endings.py`.
"""

from dataclasses import replace

from proxy.flights.actions import Emit, Fail, SubmitLocal, SubmitPrefill
from proxy.flights.causes import after_loss, gave_up
from proxy.flights.endings import end, lost
from proxy.flights.events import (
    Aborted,
    CannotContinue,
    Cause,
    Continued,
    DeadlinePassed,
    Event,
    HandoverClosed,
    LegKind,
    LegOutput,
    Placed,
    PrefillStarted,
    WorkerLost,
)
from proxy.flights.flight import Flight, IllegalTransition, Stage, Step
from proxy.flights.handover import after_output, in_decode, in_prefilling
from proxy.scheduling.place import Local, Placement, PrefillOnly, Reject, Remote, Wait


def advance(flight: Flight, event: Event) -> Step:
    """What `event` means to `flight`. Raises `IllegalTransition`."""
    match flight.stage:
        case Stage.WAITING:
            return _in_waiting(flight, event)
        case Stage.PREFILLING:
            return in_prefilling(flight, event)
        case Stage.HANDING_OVER | Stage.DECODING:
            return in_decode(flight, event)
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
            return end(flight, Fail(503, cause))
        case Aborted():
            return end(flight)
        case DeadlinePassed(cause):
            return end(flight, Fail(504, after_loss(flight.lost, cause)))
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
            return end(flight, Fail(status, after_loss(flight.lost, Cause(reason, message, retry_after_s))))


def _in_local(flight: Flight, event: Event) -> Step:
    match event:
        case LegOutput("local"):
            if event.finish == "abort":
                return lost(replace(flight, decode=""), flight.decode, gave_up(flight.decode))
            if event.finish is not None and not flight.open_ended:
                return end(replace(flight, decode=""), Emit("local", event.payload, finished=True))
            emit = Emit("local", event.payload, finished=False)
            return Step(after_output(flight, event), (emit,))
        case WorkerLost(worker, cause):
            return lost(replace(flight, decode=""), worker, cause) if worker == flight.decode else Step(flight)
        case Aborted():
            return end(flight)
        case DeadlinePassed(cause):
            return end(flight, Fail(504, cause))
        case Placed() | Continued() | CannotContinue() | PrefillStarted() | LegOutput() | HandoverClosed():
            raise IllegalTransition(flight.stage, event)
