"""A request that two workers serve: one computes the prompt, the other fetches its blocks and generates the rest."""

from dataclasses import replace

from proxy.flights.actions import Action, DropTransfer, Emit, Fail, SendFirstToken, SubmitDecode
from proxy.flights.causes import gave_up, no_token
from proxy.flights.endings import end, lost
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
from proxy.flights.flight import Flight, IllegalTransition, Stage, Step


def in_prefilling(flight: Flight, event: Event) -> Step:
    """Until the prefill leg has ended."""
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
            return end(flight)
        case DeadlinePassed(cause):
            return end(flight, Fail(504, cause))
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
        return end(ended, Emit("prefill", output.payload, finished=True))
    if output.token is None:
        return end(ended, Fail(500, no_token(flight.prefill)))
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
    return lost(flight, worker, cause)


def _decode_lost(flight: Flight, cause: Cause) -> Step:
    gone = replace(flight, decode_running=False, decode="")
    return lost(gone, flight.decode, cause, was_at_work=flight.decode_submitted)


def _decode_ended(flight: Flight) -> bool:
    """Whether the decode worker has answered everything already, and only the first token is missing."""
    return flight.decode_submitted and not flight.decode_running


def in_decode(flight: Flight, event: Event) -> Step:
    """From there on: `HANDING_OVER` and `DECODING`."""
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
            return end(flight)
        case DeadlinePassed(cause):
            return end(flight, Fail(504, cause))
        case PrefillStarted():
            return Step(flight)
        case Placed() | Continued() | CannotContinue() | LegOutput() | HandoverClosed():
            raise IllegalTransition(flight.stage, event)


def _decode_output(flight: Flight, output: LegOutput) -> Step:
    if output.finish == "abort":
        return _decode_lost(flight, gave_up(flight.decode))
    emit = Emit("decode", output.payload, output.finish is not None, flight.prefill_payload)
    if output.finish is not None:
        return end(replace(flight, decode_running=False), emit)
    return Step(after_output(flight, output), (emit,))


def after_output(flight: Flight, output: LegOutput) -> Flight:
    """After the client has got an output that is not the last."""
    if flight.progressed and flight.prefill_payload is None:
        return flight
    progressed = flight.progressed or output.token is not None
    return replace(flight, emitted=True, progressed=progressed, prefill_payload=None)
