"""Every request on its way: feeds flights with what happens and carries out what they say.

The thin shell around `flights.flight.advance`; who goes where is asked of `placing`. It runs on one event loop; nothing
in it waits. What the client should see is put, one batch per engine step, into `outputs`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from cluster import messages
from proxy.dispatch_settings import DispatchSettings
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
from proxy.flights.events import (
    Aborted,
    CannotContinue,
    Cause,
    Continued,
    DeadlinePassed,
    Event,
    HandoverClosed,
    Placed,
    PrefillStarted,
    WorkerLost,
)
from proxy.flights.flight import IllegalTransition, Stage, advance, passes_on
from proxy.flights.front_end import FrontEnd, LocalFrontEnd
from proxy.flights.recent_handovers import RecentHandovers
from proxy.flights.siblings import Siblings
from proxy.flights.trip import Trip, new_flight
from proxy.health.progress import Progress
from proxy.key_budgets import KeyBudgets
from proxy.legs.vllm_continuation import continued_request, why_not_continued
from proxy.legs.vllm_leg_outputs import BadOutputs, OutputDecoder, is_plain, leg_event, scheduled_ago_s
from proxy.legs.vllm_leg_requests import Unsendable, describe
from proxy.metrics import ProxyMetrics
from proxy.placing import Placing
from proxy.replies import Replies
from proxy.scaling.observe import prompt_alone_s
from proxy.scheduling.place import CLOSED, Decision, Local, PrefillOnly, Wait
from proxy.scheduling.slo import SloClass
from proxy.scheduling.view import RequestShape
from proxy.sending import Sending
from proxy.slo.account import Outcome
from proxy.slo.witness import Witness
from proxy.workers.roster import Loss, Worker
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")


class Dispatcher:
    """Owns every trip.

    `on_failure` is that of the front end in this process (`flights.front_end.LocalFrontEnd`), whose requests are added
    without naming one.
    """

    def __init__(
        self,
        pool: WorkerPool,
        settings: DispatchSettings,
        metrics: ProxyMetrics,
        on_failure: Callable[[str, int, str, float | None], object],
    ) -> None:
        self._local = LocalFrontEnd(on_failure)
        self.outputs = self._local.outputs
        self.trips: dict[str, Trip] = {}
        self.siblings = Siblings()
        self.progress = Progress()
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self.witness = Witness(metrics)
        self._replies = Replies(self._local, self.witness, pool.prefixes)
        self._held_s = 0.0
        self._closed = False
        self._decoder = OutputDecoder()
        self._sending = Sending(pool, metrics)
        self.legs = self._sending.legs
        self._budgets = KeyBudgets(settings, metrics)
        self._placing = Placing(
            settings.policy, pool.prefixes.index, pool.roster, pool.adapters.holdings, self._decided
        )
        self.scheduler = self._placing.scheduler
        self.meter = self.witness.meter
        self.witness.prompt_alone_s = partial(prompt_alone_s, self.scheduler)
        pool.listen(self)
        self._placing.look_at_workers()

    @property
    def recent(self) -> RecentHandovers:
        """What is remembered of hand-overs."""
        return self.witness.recent

    @property
    def outcomes(self) -> Mapping[SloClass, Mapping[Outcome, int]]:
        """How requests have ended, by class."""
        return self._metrics.slo.outcomes

    @property
    def num_waiting(self) -> int:
        """Requests that nobody works on yet."""
        return sum(trip.flight.stage is Stage.WAITING for trip in self.trips.values())

    # ------------------------------------------------------------------------------------- from the front end

    def add(
        self,
        request_id: str,
        request: Any,
        shape: RequestShape,
        group: str = "",
        choices: int = 1,
        front_end: FrontEnd | None = None,
    ) -> None:
        """Takes a request. Whatever goes wrong with it reaches the client through its front end.

        `group` names the siblings it has if it is one of several `choices` of an answer.
        """
        known = self.trips.get(request_id)
        if known is not None:
            self._more_input(known, request)
            return
        flight = new_flight(request, shape, self._settings, self._pool.roster.max_model_len)
        lifetime, account = self.witness.arrived(request), self.witness.account(shape)
        front_end = front_end or self._local
        trip = Trip(request_id, request, shape, flight, lifetime, front_end, account, group, choices)
        if not why_not_continued(request, (), shape.local_because):
            trip.sent = []
        self.trips[request_id] = trip
        if self._closed:
            self._decided(Decision(request_id, CLOSED))
        elif over := self._budgets.charge(trip, self.trips.get(self.siblings.leader_of(trip.group))):
            self._tell_failure(trip, 429, over)
            self._feed(trip, Aborted())
        elif self.siblings.join(trip):
            self._let_follow(trip.group)
        else:
            self._placing.queue(trip)
        self._flush()

    def close(self) -> None:
        """Takes no new requests any more; those that it has go on."""
        self._closed = True

    def abort(self, request_ids: Iterable[str], *, answered: bool = False) -> None:
        """Ends requests on every worker. Unknown ids have ended already.

        `answered`: their clients have all they asked for (a stop string was found); else they have left.
        """
        for request_id in list(request_ids):
            trip = self.trips.get(request_id)
            if trip is not None:
                self.witness.note(trip, "finished" if answered else "aborted")
                if answered:
                    self.witness.answered(trip)
                self._feed(trip, Aborted())
        self._flush()

    def fail_all(self, status: int, message: str) -> None:
        """Ends every request with an error, because the proxy stops."""
        for trip in list(self.trips.values()):
            if trip.request_id in self.trips:
                self._tell_failure(trip, status, Cause("stopping", message))
                self._feed(trip, Aborted())

    def _more_input(self, trip: Trip, request: Any) -> None:
        """Streamed input: the next chunk of a request, for the engine that has it already."""
        try:
            if not self._sending.more_input(trip, request):
                return
        except Unsendable as error:
            self._cannot_send(trip, error)
            return
        trip.account.pause()
        if not request.resumable:
            # The last chunk: the next finish is the end of the request.
            trip.flight = replace(trip.flight, open_ended=False)

    # ------------------------------------------------------------------------------------------- from workers

    def on_outputs(self, worker: Worker, frames: Sequence[zmq.Frame]) -> None:
        """One engine step of a worker."""
        try:
            step = self._decoder.decode(frames)
        except BadOutputs as error:
            self._metrics.bad_frames.inc()
            log.warning("bad_outputs worker=%s error=%s", worker.worker_id, error)
            return
        now_s = time.monotonic()
        if step.outputs:
            self.progress.worked(worker.worker_id, now_s)
        goes_on = False
        for output in step.outputs:
            leg = self.legs.find(output.request_id, worker.worker_id)
            if leg is None:
                continue
            if leg.trip.passes_on == leg.kind and is_plain(output):
                self._replies.pass_on(leg.trip, output, now_s)
                goes_on = True
                continue
            if output.events and (ago_s := scheduled_ago_s(output, step.timestamp)) is not None:
                self.witness.scheduled(leg.trip, leg.kind, ago_s)
            goes_on |= leg.trip.num_outputs >= 2
            event = leg_event(leg.kind, output)
            if leg.kind != "decode" and event.finish != "abort":
                self._placing.prompt_computed(leg.trip)
            if output.finish_reason is not None and not leg.trip.flight.open_ended:
                self._sending.close(leg.trip, leg.kind)
            self._feed(leg.trip, event)
        self._placing.look_at_step(worker.worker_id, now_s, goes_on=goes_on)
        self._flush(worker, step)

    def on_prefill_started(self, worker: Worker, transfer_id: str) -> None:
        """The prefill engine scheduled the first chunk of a hand-over."""
        self.progress.worked(worker.worker_id, time.monotonic())
        trip = self._sending.trip_of(transfer_id)
        if trip is not None and trip.transfer_id == transfer_id and trip.flight.prefill == worker.worker_id:
            self.witness.note(trip, "prefill_started")
            self._feed(trip, PrefillStarted())
            self._flush()

    def on_handover_closed(self, worker: Worker, closed: messages.HandoverClosed) -> None:
        """A decode worker has all it can get of a hand-over."""
        trip = self._sending.transfer_closed(closed.transfer_id)
        if trip is None:
            return
        current = closed.transfer_id == trip.transfer_id and trip.flight.decode == worker.worker_id
        self.witness.handover_closed(trip, closed, current=current)
        if current:
            self._feed(trip, HandoverClosed(closed.outcome))
            self._flush()

    def on_worker_lost(self, loss: Loss) -> None:
        """Ends or replaces everything that depends on a worker."""
        self._placing.look_at_workers()
        touched = {leg.trip.request_id: leg.trip for leg in self._sending.lose(loss)}
        # Some have no leg there now, but a lease or a decode leg to come.
        touched.update(
            {t.request_id: t for t in self.trips.values() if loss.worker_id in (t.flight.prefill, t.flight.decode)}
        )
        for trip in touched.values():
            self._feed(trip, WorkerLost(loss.worker_id, Cause(loss.kind, loss.cause)))
        self._flush()

    def on_pool_changed(self) -> None:
        """Somebody came or went: whoever waits may be placed now."""
        self._placing.look_at_workers()
        self._flush()

    def on_load(self, worker: Worker, load: messages.WorkerLoad) -> None:
        """A worker says what it carries; there may be more room than was believed."""
        self._placing.look_at_load(load)
        self._flush()

    def needs(self, worker_id: str) -> bool:
        """Whether a request is at a worker, is still to be sent there, or has blocks there that are still fetched."""
        fetching = (Stage.PREFILLING, Stage.HANDING_OVER)
        return bool(self.legs.workload(worker_id).legs) or any(
            worker_id == trip.flight.decode or (worker_id == trip.flight.prefill and trip.flight.stage in fetching)
            for trip in self.trips.values()
        )

    def adapters_in_use(self) -> frozenset[int]:
        """LoRA adapters that requests want."""
        return frozenset(trip.shape.adapter for trip in self.trips.values())

    def on_beat(self, now_s: float) -> None:
        """Deadlines of the queue, renewal of leases, who gets on, reports that will not come any more."""
        settings = self._settings
        for request_id in self._placing.beat(now_s, settings.queue_timeout_s, settings.absent_timeout_s):
            trip = self.trips.get(request_id)
            if trip is not None:
                waited_s = now_s - (trip.lifetime.last("arrived") or now_s)
                message = f"No worker could take the request, which arrived {waited_s:.0f} s ago"
                self._feed(trip, DeadlinePassed(Cause("queue_timeout", f"{message}; try again later")))
        if now_s - self._held_s >= self._settings.hold_every_s:
            self._held_s = now_s
            self._sending.hold_leases(self.trips.values())
        self._sending.forget_late_news(now_s)
        self.progress.beat(self._pool.roster.alive(), self.legs.at_work(), now_s)
        self._metrics.observe_pace(self.progress.without_progress_s(), self.scheduler.books.lengths.usual)
        self._metrics.observe_stages(
            [(trip.flight.stage.value, now_s - trip.lifetime.events[-1][1]) for trip in self.trips.values()]
        )
        self._flush()

    # ---------------------------------------------------------------------------------------------- placement

    def _decided(self, decision: Decision) -> None:
        trip = self.trips.get(decision.request_id)
        if trip is None:
            return
        placement = decision.placement
        self._metrics.observe_decision(type(placement).__name__.lower(), placement.reason)
        if not isinstance(placement, Wait):
            trip.demoted = decision.demoted
            self.witness.note(trip, "placed")
            log.info("placed request=%s placement=%s", trip.request_id, placement)
            self._feed(trip, Placed(placement))

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
            if not self._placing.follow(trip, worker.worker_id):
                self.siblings.hold_up(leader, following.request_ids[number:])
                return
            trip.scores = following.scores
            self._decided(Decision(request_id, follow(worker.worker_id, "sibling")))

    # ---------------------------------------------------------------------------------------- flights' actions

    def _feed(self, trip: Trip, event: Event) -> None:
        if trip.flight.finished:
            return
        before = trip.flight
        try:
            step = advance(trip.flight, event)
        except IllegalTransition as error:
            self._metrics.illegal_transitions.inc()
            log.error("illegal_transition request=%s error=%s", trip.request_id, error)
            return
        trip.flight = step.flight
        if before.prefill_running and not trip.flight.prefill_running:
            self._placing.prefill_over(trip)
        try:
            for action in step.actions:
                self._perform(trip, action)
        except Unsendable as error:
            self._cannot_send(trip, error)
        # The first two outputs are parts of the request's lifetime.
        trip.passes_on = passes_on(trip.flight) if trip.num_outputs >= 2 else None
        if trip.group:
            # Also when it has finished: held outputs may come and end it all at once.
            self._let_follow(trip.group, ended_at=before.decode)
        if trip.flight.finished:
            self._forget(trip)

    def _cannot_send(self, trip: Trip, error: Unsendable) -> None:
        """Ends a request by its own fault; whatever else the message at hand leads to still happens."""
        self._tell_failure(trip, 400, Cause("unsendable", str(error)))
        self._feed(trip, Aborted())

    def _perform(self, trip: Trip, action: Action) -> None:
        match action:
            case Emit(leg, payload, finished, prefill):
                went_well = self._replies.emit(trip, leg, payload, finished, prefill)
                if finished:
                    self.witness.note(trip, "finished")
                    self.witness.answered(trip, well=went_well)
            case SubmitPrefill(worker_id):
                self._sending.prefill(trip, worker_id)
            case SubmitDecode(worker_id):
                self._sending.decode(trip, worker_id)
            case SubmitLocal(worker_id):
                self._sending.local(trip, worker_id)
            case SendFirstToken(worker_id, token):
                self._sending.first_token(trip, worker_id, token)
            case DropTransfer(worker_id):
                self._sending.drop_transfer(trip, worker_id)
            case AbortLeg(kind, worker_id):
                self._sending.abort(trip, kind, worker_id)
            case PlaceAnew(cause, lost):
                self._metrics.replacements.inc()
                log.warning("placed_anew request=%s cause=%s", trip.request_id, cause.message)
                self.witness.note(trip, "placed_anew")
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
            self._feed(trip, CannotContinue(cannot_continue(cause, why_not)))
            return
        self._metrics.migrations.labels(cause.kind).inc()
        log.warning("continued request=%s sent=%d cause=%s", trip.request_id, len(sent), cause.message)
        self.witness.note(trip, "continued")
        trip.continued = continued_request(trip.request, sent)
        shape = describe(trip.continued)
        trip.shape = replace(shape, standing=trip.shape.standing, continues=True)
        heir = self.siblings.resign(trip)
        self._feed(trip, Continued(shape.num_prompt_tokens, shape.max_tokens, shape.first_token_mode))
        self._place_without(trip, lost)
        self._inherit(heir)

    def _inherit(self, heir_id: str | None) -> None:
        """A sibling leads from now on. Its client has got something of the one that led."""
        heir = self.trips.get(heir_id or "")
        if heir is not None:
            heir.shape = replace(heir.shape, accepted=True)
            self._placing.queue(heir)

    def _place_without(self, trip: Trip, lost: str) -> None:
        self._sending.expect_late_news(trip)
        trip.transfer_id = ""
        trip.shape = replace(trip.shape, avoid=lost)
        self._placing.queue(trip)

    def _tell_failure(self, trip: Trip, status: int, cause: Cause) -> None:
        siblings = [t for t in self.trips.values() if t.group == trip.group] if trip.group else []
        self.witness.failed(trip, siblings, status, cause)
        trip.front_end.fail(trip.request_id, status, cause.message, cause.retry_after_s)
        self.abort(sibling.request_id for sibling in siblings if sibling is not trip)

    def _flush(self, worker: Worker | None = None, step: Any = None) -> None:
        """Takes the decisions that one message made possible, and passes on the outputs that it led to."""
        for group in self.siblings.held_up():
            self._let_follow(group)
        self._placing.settle()
        self._replies.flush(worker.index if worker is not None else 0, step)

    # -------------------------------------------------------------------------------------------- bookkeeping

    def _forget(self, trip: Trip) -> None:
        for kind in list(trip.legs):
            self._sending.close(trip, kind)
        self._placing.forget(trip)
        if self.trips.pop(trip.request_id, None) is not None:
            self.witness.ended(trip)
            self._budgets.settle(trip)
        self._sending.expect_late_news(trip)
        self._inherit(self.siblings.leave(trip))
