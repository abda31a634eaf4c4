"""Hears what clients want and what workers say, and turns it into events of requests.

What follows from them is carried out by `conductor`. It runs on one event loop; nothing in it waits. What clients of
this process should see is put, one batch per engine step, into `outputs`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from cluster import messages
from proxy.dispatch.conductor import Conductor
from proxy.dispatch.settings import DispatchSettings
from proxy.dispatch.witness import Witness
from proxy.flights.events import Cause, DeadlinePassed, HandoverClosed, PrefillStarted, WorkerLost
from proxy.flights.flight import Flight, Stage
from proxy.health.progress import Progress
from proxy.legs.vllm_continuation import why_not_continued
from proxy.legs.vllm_leg_outputs import BadOutputs, OutputDecoder, is_plain, leg_event, scheduled_ago_s
from proxy.legs.vllm_leg_requests import Unsendable
from proxy.metrics import ProxyMetrics
from proxy.scaling.observe import prompt_alone_s
from proxy.scheduling.place import CLOSED, Reject
from proxy.scheduling.slo import SloClass
from proxy.scheduling.view import RequestShape
from proxy.slo.account import Outcome
from proxy.trips.front_end import FrontEnd, LocalFrontEnd
from proxy.trips.recent_handovers import RecentHandovers
from proxy.trips.trip import Trip
from proxy.workers.roster import Loss, Worker
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")


class Dispatcher:
    """Listens to front ends and to the worker pool.

    `on_failure` is that of the front end in this process (`trips.front_end.LocalFrontEnd`), whose requests are added
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
        self.progress = Progress()
        self.witness = Witness(metrics)
        self.meter = self.witness.meter
        self._conductor = Conductor(pool, settings, metrics, self.witness, self._local)
        self.trips = self._conductor.trips
        self.siblings = self._conductor.siblings
        self._placing, self._sending = self._conductor.placing, self._conductor.sending
        self.legs = self._sending.legs
        self.scheduler = self._placing.scheduler
        self.witness.prompt_alone_s = partial(prompt_alone_s, self.scheduler)
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._held_s = 0.0
        self._refusal: Reject | None = None
        self._decoder = OutputDecoder()
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
        if known is None:
            trip = self._trip(request_id, request, shape, group, choices, front_end or self._local)
            self._conductor.start(trip, refusal=self._refusal)
        else:
            self._more_input(known, request)
        self._conductor.flush()

    def _trip(
        self, request_id: str, request: Any, shape: RequestShape, group: str, choices: int, front_end: FrontEnd
    ) -> Trip:
        flight = Flight(
            num_prompt_tokens=shape.num_prompt_tokens,
            max_tokens=shape.max_tokens,
            max_model_len=self._pool.roster.max_model_len,
            first_token_mode=shape.first_token_mode,
            wants_prompt_scores=shape.wants_prompt_scores,
            reserve_at_start=self._settings.reserve_at_start,
            open_ended=bool(request.resumable),
            streamed=bool(request.resumable),
            max_losses=self._settings.max_losses,
        )
        lifetime, account = self.witness.arrived(request), self.witness.account(shape)
        trip = Trip(request_id, request, shape, flight, lifetime, front_end, account, group, choices)
        if not why_not_continued(request, (), shape.local_because):
            trip.sent = []
        return trip

    def close(self) -> None:
        """Takes no new requests any more; those that it has go on."""
        self._refusal = CLOSED

    def hold_off(self, answer: Reject | None) -> None:
        """Answers new requests with this from now on; None: takes them again, unless it was closed."""
        if self._refusal is not CLOSED:
            self._refusal = answer

    @property
    def num_requests(self) -> int:
        """That have not ended."""
        return len(self.trips)

    def abort(self, request_ids: Iterable[str], *, answered: bool = False) -> None:
        """Ends requests on every worker. Unknown ids have ended already.

        `answered`: their clients have all they asked for (a stop string was found); else they have left.
        """
        self._conductor.abort(request_ids, answered=answered)
        self._conductor.flush()

    def fail_all(self, status: int, message: str) -> None:
        """Ends every request with an error, because the proxy stops."""
        for trip in list(self.trips.values()):
            if trip.request_id in self.trips:
                self._conductor.fail(trip, status, Cause("stopping", message))
        self._conductor.flush()

    def _more_input(self, trip: Trip, request: Any) -> None:
        """Streamed input: the next chunk of a request, for the engine that has it already."""
        try:
            if not self._sending.more_input(trip, request):
                return
        except Unsendable as error:
            self._conductor.cannot_send(trip, error)
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
        now_s, replies = time.monotonic(), self._conductor.replies
        if step.outputs:
            self.progress.worked(worker.worker_id, now_s)
        goes_on = False
        for output in step.outputs:
            leg = self.legs.find(output.request_id, worker.worker_id)
            if leg is None:
                continue
            if leg.trip.passes_on == leg.kind and is_plain(output):
                replies.pass_on(leg.trip, output, now_s)
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
            self._conductor.feed(leg.trip, event)
        self._placing.look_at_step(worker.worker_id, now_s, goes_on=goes_on)
        self._conductor.flush(worker, step)

    def on_prefill_started(self, worker: Worker, transfer_id: str) -> None:
        """The prefill engine scheduled the first chunk of a hand-over."""
        self.progress.worked(worker.worker_id, time.monotonic())
        trip = self._sending.trip_of(transfer_id)
        if trip is not None and trip.transfer_id == transfer_id and trip.flight.prefill == worker.worker_id:
            self.witness.note(trip, "prefill_started")
            self._conductor.feed(trip, PrefillStarted())
            self._conductor.flush()

    def on_handover_closed(self, worker: Worker, closed: messages.HandoverClosed) -> None:
        """A decode worker has all it can get of a hand-over."""
        trip = self._sending.transfer_closed(closed.transfer_id)
        if trip is None:
            return
        current = closed.transfer_id == trip.transfer_id and trip.flight.decode == worker.worker_id
        self.witness.handover_closed(trip, closed, current=current)
        if current:
            self._conductor.feed(trip, HandoverClosed(closed.outcome))
            self._conductor.flush()

    def on_worker_lost(self, loss: Loss) -> None:
        """Ends or replaces everything that depends on a worker."""
        self._placing.look_at_workers()
        touched = {leg.trip.request_id: leg.trip for leg in self._sending.lose(loss)}
        # Some have no leg there now, but a lease or a decode leg to come.
        touched.update(
            {t.request_id: t for t in self.trips.values() if loss.worker_id in (t.flight.prefill, t.flight.decode)}
        )
        for trip in touched.values():
            self._conductor.feed(trip, WorkerLost(loss.worker_id, Cause(loss.kind, loss.cause)))
        self._conductor.flush()

    def on_pool_changed(self) -> None:
        """Somebody came or went: whoever waits may be placed now."""
        self._placing.look_at_workers()
        self._conductor.flush()

    def on_load(self, worker: Worker, load: messages.WorkerLoad) -> None:
        """A worker says what it carries; there may be more room than was believed."""
        self._placing.look_at_load(worker.worker_id, load)
        self._conductor.flush()

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
                self._conductor.feed(trip, DeadlinePassed(Cause("queue_timeout", f"{message}; try again later")))
        if now_s - self._held_s >= settings.hold_every_s:
            self._held_s = now_s
            self._sending.hold_leases(self.trips.values())
        self._sending.forget_late_news(now_s)
        self.progress.beat(self._pool.roster.alive(), self.legs.at_work(), now_s)
        self._metrics.observe_pace(self.progress.without_progress_s(), self.scheduler.books.lengths.usual)
        self._metrics.observe_stages(
            [(trip.flight.stage.value, now_s - trip.lifetime.events[-1][1]) for trip in self.trips.values()]
        )
        self._conductor.flush()
