"""Charges requests to the budgets of their API keys (`slo.rate_limits`), and gives back what they did not use."""

from proxy.dispatch.settings import DispatchSettings
from proxy.flights.events import Cause
from proxy.metrics import ProxyMetrics
from proxy.scheduling.slo import PROBE
from proxy.slo.rate_limits import RateLimits
from proxy.trips.trip import Trip


class KeyBudgets:
    """Of all requests of a dispatcher."""

    def __init__(self, settings: DispatchSettings, metrics: ProxyMetrics) -> None:
        self._limits = RateLimits(settings.rate_limits, settings.keys_are_checked, metrics.observe_rate_limited)

    def charge(self, trip: Trip, leader: Trip | None) -> Cause | None:
        """Reserves what a request may use; a cause if that is too much.

        `leader`: the sibling that came first, and was charged for all of them.
        """
        standing, shape = trip.shape.standing, trip.shape
        if standing.slo == PROBE:
            return None
        if leader is not None:
            trip.reserved = leader.reserved.for_sibling()
            return None
        taken = self._limits.take(standing.tenant, shape.num_prompt_tokens, shape.max_tokens, trip.choices)
        if isinstance(taken, Cause):
            return taken
        trip.reserved = taken
        return None

    def settle(self, trip: Trip) -> None:
        """The request has ended."""
        self._limits.settle(trip.reserved, trip.num_tokens)
