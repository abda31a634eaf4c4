"""Moves trips on: tells a request's flight what has happened and carries out what that asks for.

The thin shell around `flights.transitions.advance`. It runs on one event loop; nothing in it waits.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from proxy.dispatch.key_budgets import KeyBudgets
from proxy.dispatch.placing import Placing
from proxy.dispatch.replies import Replies
from proxy.dispatch.sending import Sending
from proxy.dispatch.settings import DispatchSettings
from proxy.dispatch.witness import Witness
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
from proxy.flights.causes import cannot_continue
from proxy.flights.events import Aborted, CannotContinue, Cause, Continued, Event, Placed
from proxy.flights.flight import IllegalTransition
from proxy.flights.transitions import advance, passes_on
from proxy.legs.vllm_continuation import continued_request, why_not_continued
from proxy.legs.vllm_leg_requests import Unsendable, describe
from proxy.metrics import ProxyMetrics
from proxy.scheduling.place import Decision, Local, PrefillOnly, Reject, Wait
from proxy.trips.front_end import FrontEnd
from proxy.trips.siblings import Siblings
from proxy.trips.trip import Trip
from proxy.workers.roster import Worker
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")


class Conductor:
    """Owns every trip, from its start until nothing of it is left.

    Whoever has called `start`, `feed` or `fail` calls `flush` when one message has been dealt with. `local`: the front
    end of this process, which gets the engines' statistics too.
    """

    def __init__(
        self, pool: WorkerPool, settings: DispatchSettings, metrics: ProxyMetrics, witness: Witness, local: FrontEnd
    ) -> None:
        self.trips: dict[str, Trip] = {}
        self.siblings = Siblings()
        self.sending = Sending(pool, metrics)
        self.replies = Replies(local, witness, pool.prefixes)
        self.placing = Placing(settings.policy, pool.prefixes.index, pool.roster, pool.adapters.holdings, self._decided)
        self._budgets = KeyBudgets(settings, metrics)
        self._pool = pool
        self._metrics = metrics
        self._witness = witness

    def start(self, trip: Trip, *, refusal: Reject | None) -> None:
        """A request has come; with `refusal` no new ones are taken."""
        self.trips[trip.request_id] = trip
        if refusal is not None:
            self._decided(Decision(trip.request_id, refusal))
        elif over := self._budgets.charge(trip, self.trips.get(self.siblings.leader_of(trip.group))):
            self.fail(trip, 429, over)
        elif self.siblings.join(trip):
            self._let_follow(trip.group)
        else:
            self.placing.queue(trip)

    def feed(self, trip: Trip, event: Event) -> None:
        """Something has happened to a request; nothing can, once it has ended."""
        if trip.flight.finished:
            return
        before = trip.flight
        try:
            step = advance(trip.flight, event)
        except IllegalTransition as error:
            self._metrics.illegal_transitions.inc()
            log.error(
                "illegal_transition request=%s prefill=%s decode=%s error=%s",
                *(trip.request_id, before.prefill, before.decode, error),
            )
            return
        trip.flight = step.flight
        if before.prefill_running and not trip.flight.prefill_running:
            self.placing.prefill_over(trip)
        try:
            for action in step.actions:
                self._perform(trip, action)
        except Unsendable as error:
            self.cannot_send(trip, error)
        # The first two outputs are parts of the request's lifetime.
        trip.passes_on = passes_on(trip.flight) if trip.num_outputs >= 2 else None
        if trip.group:
            # Also when it has finished: held outputs may come and end it all at once.
            self._let_follow(trip.group, ended_at=before.decode)
        if trip.flight.finished:
            self._forget(trip)

    def fail(self, trip: Trip, status: int, cause: Cause) -> None:
        """Ends a request, and its siblings, with an error for their client."""
        self._tell_failure(trip, status, cause)
        self.feed(trip, Aborted())

    def cannot_send(self, trip: Trip, error: Unsendable) -> None:
        """Ends a request by its own fault; whatever else the message at hand leads to still happens."""
        self.fail(trip, 400, Cause("unsendable", str(error)))

    def abort(self, request_ids: Iterable[str], *, answered: bool) -> None:
        """Ends requests that nobody waits for any more. Unknown ids have ended already."""
        for request_id in list(request_ids):
            trip = self.trips.get(request_id)
            if trip is not None:
                self._witness.note(trip, "finished" if answered else "aborted")
                if answered:
                    self._witness.answered(trip)
                self.feed(trip, Aborted())

    def flush(self, worker: Worker | None = None, step: Any = None) -> None:
        """Takes the decisions that one message made possible, and passes on the outputs that it led to.

        `step`: the `EngineCoreOutputs` of `worker`, if the message was that.
        """
        for group in self.siblings.held_up():
            self._let_follow(group)
        self.placing.settle()
        self.replies.flush(worker.index if worker is not None else 0, step)

    # ---------------------------------------------------------------------------------------------- placement

    def _decided(self, decision: Decision) -> None:
        trip = self.trips.get(decision.request_id)
        if trip is None:
            return
        placement = decision.placement
        self._metrics.observe_decision(type(placement).__name__.lower(), placement.reason)
        if not isinstance(placement, Wait):
            trip.demoted = decision.demoted
            self._witness.note(trip, "placed")
            log.info("placed request=%s placement=%s", trip.request_id, placement)
            self.feed(trip, Placed(placement))

    def _let_follow(self, group: str, ended_at: str = "") -> None:
        """Sends waiting siblings where their leader has the prompt; `ended_at`: where it had it, if it has ended."""
        leader = self.trips.get(self.siblings.leader_of(group))
        if leader is None:
            return
        worker = self._pool.roster.workers.get(leader.flight.decode or ended_at)
        if worker is None or not worker.alive or not (following := self.siblings.following(leader)):
            return
        follow = PrefillOnly if worker.role == "prefill" else Local
        for number, request_id in enumerate(following.request_ids):
            trip = self.trips.get(request_id)
            if trip is None:
                continue
            if not self.placing.follow(trip, worker.worker_id):
                self.siblings.hold_up(leader, following.request_ids[number:])
                return
            trip.scores = following.scores
            self._decided(Decision(request_id, follow(worker.worker_id, "sibling")))

    def _inherit(self, heir_id: str | None) -> None:
        """A sibling leads from now on. Its client has got something of the one that led."""
        heir = self.trips.get(heir_id or "")
        if heir is not None:
            heir.shape = replace(heir.shape, accepted=True)
            self.placing.queue(heir)

    def _place_without(self, trip: Trip, lost: str) -> None:
        self.sending.expect_late_news(trip)
        trip.transfer_id = ""
        trip.shape = replace(trip.shape, avoid=lost)
        self.placing.queue(trip)

    # ------------------------------------------------------------------------------------------------ actions

    def _perform(self, trip: Trip, action: Action) -> None:
        match action:
            case Emit(leg, payload, finished, prefill):
                went_well = self.replies.emit(trip, leg, payload, finished, prefill)
                if finished:
                    self._witness.note(trip, "finished")
                    self._witness.answered(trip, well=went_well)
            case SubmitPrefill(worker_id):
                self.sending.prefill(trip, worker_id)
            case SubmitDecode(worker_id):
                self.sending.decode(trip, worker_id)
            case SubmitLocal(worker_id):
                self.sending.local(trip, worker_id)
            case SendFirstToken(worker_id, token):
                self.sending.first_token(trip, worker_id, token)
            case DropTransfer(worker_id):
                self.sending.drop_transfer(trip, worker_id)
            case AbortLeg(kind, worker_id):
                self.sending.abort(trip, kind, worker_id)
            case PlaceAnew(cause, lost):
                self._metrics.replacements.inc()
                log.warning("placed_anew request=%s lost=%s cause=%s", trip.request_id, lost, cause.message)
                self._witness.note(trip, "placed_anew")
                self._place_without(trip, lost)
            case Continue(cause, lost):
                self._continue(trip, cause, lost)
            case Fail(status, cause):
                self._tell_failure(trip, status, cause)

    def _continue(self, trip: Trip, cause: Cause, lost: str) -> None:
        """Makes what the client has got part of the prompt and places the rest; or says why that is impossible."""
        sent = trip.sent or ()
        why_not = why_not_continued(trip.request, sent, trip.shape.local_because)
        if why_not:
            self.feed(trip, CannotContinue(cannot_continue(cause, why_not)))
            return
        self._metrics.migrations.labels(cause.kind).inc()
        log.warning("continued request=%s sent=%d lost=%s cause=%s", trip.request_id, len(sent), lost, cause.message)
        self._witness.note(trip, "continued")
        trip.continued = continued_request(trip.request, sent)
        shape = describe(trip.continued)
        trip.shape = replace(shape, standing=trip.shape.standing, continues=True)
        heir = self.siblings.resign(trip)
        self.feed(trip, Continued(shape.num_prompt_tokens, shape.max_tokens, shape.first_token_mode))
        self._place_without(trip, lost)
        self._inherit(heir)

    def _tell_failure(self, trip: Trip, status: int, cause: Cause) -> None:
        siblings = [t for t in self.trips.values() if t.group == trip.group] if trip.group else []
        self._witness.failed(trip, siblings, status, cause)
        trip.front_end.fail(trip.request_id, status, cause.message, cause.retry_after_s)
        self.abort((sibling.request_id for sibling in siblings if sibling is not trip), answered=False)

    def _forget(self, trip: Trip) -> None:
        for kind in list(trip.legs):
            self.sending.close(trip, kind)
        self.placing.forget(trip)
        if self.trips.pop(trip.request_id, None) is not None:
            self._witness.ended(trip)
            self._budgets.settle(trip)
        self.sending.expect_late_news(trip)
        self._inherit(self.siblings.leave(trip))
