"""Sees what happens to requests and tells it: to their lifetimes, their accounts, the metrics, and `/ready`."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from cluster.messages import HandoverClosed
from proxy.flights.events import Cause, LegKind
from proxy.metrics import ProxyMetrics
from proxy.scaling.meter import Meter
from proxy.scheduling.slo import PROBE
from proxy.scheduling.view import RequestShape
from proxy.slo.account import Account
from proxy.trips.lifetime import Lifetime, LifetimeEvent
from proxy.trips.recent_handovers import RecentHandovers
from proxy.trips.trip import Trip

log = logging.getLogger("twinpool.proxy")

TRY_LATER = (429, 503, 504)
OLDEST_ARRIVAL_S = 60.0
"""Wall clocks jump; an arrival longer ago than this is not believed."""
_SUBMITTED: tuple[LifetimeEvent, ...] = ("prefill_submitted", "local_submitted")


class Witness:
    """One per dispatcher."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self.recent = RecentHandovers()
        self.handed_over_at_s: float | None = None
        """When a request last went through both pools: its blocks were loaded and the decode worker has answered."""
        self.answered_at_s: float | None = None
        """When a worker that does both last answered."""
        self.meter = Meter()
        """What clients got, for the autoscaler."""
        self.prompt_alone_s: Callable[[int], float] = lambda _num_tokens: 0.0
        """How long a prompt takes a worker that has nothing else to do."""
        self._metrics = metrics

    def note(self, trip: Trip, event: LifetimeEvent) -> None:
        """Something happened to a request just now."""
        trip.lifetime.note(event, time.monotonic())

    def arrived(self, request: Any) -> Lifetime:
        """The lifetime of a request that the dispatcher just got; it begins where vLLM's front end got it."""
        now_s = time.monotonic()
        lifetime = Lifetime()
        lifetime.note("arrived", now_s - _age_s(request))
        lifetime.note("received", now_s)
        return lifetime

    def scheduled(self, trip: Trip, leg: LegKind, ago_s: float) -> None:
        """An engine first scheduled this leg so long ago."""
        event: dict[LegKind, LifetimeEvent] = {
            "prefill": "prefill_scheduled",
            "decode": "decode_scheduled",
            "local": "local_scheduled",
        }
        trip.lifetime.note(event[leg], time.monotonic() - ago_s)

    def output(self, trip: Trip, leg: LegKind) -> None:
        """An output goes to the client. Called for every token."""
        now_s = time.monotonic()
        trip.num_outputs += 1
        trip.account.output(now_s)
        if trip.num_outputs <= 2:
            self._early_output(trip, leg, now_s)

    def _early_output(self, trip: Trip, leg: LegKind, now_s: float) -> None:
        if leg == "decode":
            self._decode_answered(trip, now_s)
        elif leg == "local":
            self.answered_at_s = now_s
        if trip.num_outputs == 1:
            self._first_output(trip, leg, now_s)
            return
        trip.lifetime.note("second_output", now_s)
        gap_s = trip.lifetime.between("first_output", "second_output")
        if gap_s is None or _is_probe(trip):
            return
        self._metrics.second_token_seconds.observe(gap_s)
        if leg == "decode" and trip.shape.first_token_mode and not trip.shape.continues:
            self._metrics.observe_handover_gap(gap_s, trip.lifetime.second_token_parts())

    def _first_output(self, trip: Trip, leg: LegKind, now_s: float) -> None:
        trip.lifetime.first_from = leg
        trip.lifetime.note("first_output", now_s)
        parts = trip.lifetime.first_token_parts()
        if parts is None or _is_probe(trip):
            return
        trip.account.ttft_s = parts.total_s
        alone_s = self.prompt_alone_s(trip.shape.num_prompt_tokens)
        self.meter.first_token(parts.total_s, trip.account.slo.ttft_s, alone_s)
        self._metrics.observe_first_token(parts)
        self.recent.first_output(trip)

    def _decode_answered(self, trip: Trip, now_s: float) -> None:
        if trip.lifetime.last("handover_loaded") is not None:
            self.handed_over_at_s = now_s

    def handover_closed(self, trip: Trip, closed: HandoverClosed, *, current: bool) -> None:
        """A decode worker has all it can get of a hand-over; `current`: the one that the request depends on."""
        self._metrics.observe_handover(closed)
        if not _is_probe(trip):
            self.recent.closed(trip, closed)
        log.info(
            "handover_closed request=%s transfer=%s outcome=%s kind=%s link=%s bytes=%d after_done_s=%.4f copy_s=%.4f",
            *(trip.request_id, closed.transfer_id, closed.outcome, closed.failure_kind, closed.link),
            *(closed.bytes_moved, closed.done_to_loaded_s, closed.copy_s),
        )
        now_s = time.monotonic()
        if current:
            trip.lifetime.note("handover_closed", now_s)
        if closed.outcome == "loaded" and (current or trip.flight.finished):
            trip.lifetime.note("handover_loaded", now_s)
            if trip.num_outputs > (1 if trip.shape.first_token_mode else 0) and not trip.shape.continues:
                self._decode_answered(trip, now_s)

    def answered(self, trip: Trip, *, well: bool = True) -> None:
        """The client has all of its answer; not `well`: an engine ended it with an error."""
        if well:
            trip.account.answered()
        else:
            trip.account.settle("failed")

    def failed(self, trip: Trip, siblings: Iterable[Trip], status: int, cause: Cause) -> None:
        """A request is answered with an error, and its siblings with it."""
        self.note(trip, "failed")
        if not _is_probe(trip):
            self._metrics.failed.labels(str(status), cause.kind).inc()
        log.warning("request_failed request=%s status=%d cause=%s", trip.request_id, status, cause.message)
        untouched = all(trip.lifetime.last(event) is None for event in _SUBMITTED)
        if status in TRY_LATER and untouched:
            self._metrics.slo.rejected(trip.account, cause.kind)
        outcome = trip.account.outcome or "failed"
        for each in (trip, *siblings):
            each.account.settle(outcome)

    def ended(self, trip: Trip) -> None:
        """Nothing is left of a request."""
        self._metrics.slo.close(trip.account, trip.party)
        outcome = trip.account.outcome
        if _is_probe(trip) or outcome in ("failed", "aborted"):
            return
        if outcome == "rejected":
            self.meter.turned_away()
        else:
            self.meter.stream(uneven=outcome in ("missed_itl", "missed_both"))

    def account(self, shape: RequestShape) -> Account:
        """The account of a request of this shape."""
        return self._metrics.slo.open(shape.standing)


def _is_probe(trip: Trip) -> bool:
    return trip.account.slo.name == PROBE.name


def _age_s(request: Any) -> float:
    """Seconds since vLLM's front end, possibly in another process, got the request."""
    age_s = time.time() - getattr(request, "arrival_time", 0.0)
    return age_s if 0 <= age_s <= OLDEST_ARRIVAL_S else 0.0
