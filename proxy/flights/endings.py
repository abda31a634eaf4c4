"""How a flight ends, or leaves workers that are lost: nothing of it stays behind at any of them."""

from dataclasses import replace

from proxy.flights.actions import AbortLeg, Action, Continue, DropTransfer, Fail, PlaceAnew
from proxy.flights.causes import too_often
from proxy.flights.events import Cause
from proxy.flights.flight import Flight, Stage, Step


def lost(flight: Flight, worker: str, cause: Cause, was_at_work: bool = True) -> Step:
    """A leg is lost: clean up the other one, then start over if the client saw nothing yet, or go on elsewhere."""
    cleanup = _cleanup(flight)
    losses = (0 if flight.progressed else flight.losses) + was_at_work
    if losses >= flight.max_losses:
        return Step(replace(_cleared(flight), stage=Stage.FINISHED), (*cleanup, Fail(503, too_often(cause, losses))))
    again = replace(_cleared(flight), stage=Stage.WAITING, progressed=False, losses=losses, lost=cause)
    seen = flight.emitted or flight.streamed
    return Step(again, (*cleanup, Continue(cause, worker) if seen else PlaceAnew(cause, worker)))


def end(flight: Flight, *last: Action) -> Step:
    """Nothing more comes of it, after what is `last` for its client."""
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
