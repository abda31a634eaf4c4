"""Metrics per class: how requests ended, why some were turned away, and the gaps between outputs."""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.scheduling.slo import PROBE, SloClass, Standing
from proxy.slo.account import Account, Outcome
from proxy.slo.party import Party

GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class GapCounts:
    """The gaps of one class. `prometheus_client` takes a lock and a method call per bucket; this is for every token."""

    __slots__ = ("_bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float] = GAP_SECONDS) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, gap_s: float) -> None:
        """Counts a gap."""
        self.counts[bisect_left(self._bounds, gap_s)] += 1
        self.sum_s += gap_s


class GapHistogram(Collector):
    """Shows the gaps of all classes as one histogram."""

    def __init__(self, name: str, help_: str) -> None:
        self._name, self._help = name, help_
        self._classes: dict[str, GapCounts] = {}

    def of(self, slo_class: str) -> GapCounts:
        """Where the gaps of a class are counted."""
        return self._classes.setdefault(slo_class, GapCounts())

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        family = HistogramMetricFamily(self._name, self._help, labels=("slo_class",))
        names = [*(str(bound) for bound in GAP_SECONDS), "+Inf"]
        for slo_class, gaps in self._classes.items():
            buckets = list(zip(names, accumulate(gaps.counts), strict=True))
            family.add_metric((slo_class,), buckets, gaps.sum_s)
        yield family

    def describe(self) -> Iterator[Metric]:
        """Its name, so that the registry sees what would collide."""
        yield HistogramMetricFamily(self._name, self._help, labels=("slo_class",))


class SloMetrics:
    """All of them. One per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.outcomes: dict[SloClass, Counts[Outcome]] = {}
        """By class, of those that had a request."""
        self._requests = Counter(
            "twinpool_slo_requests",
            "Requests that ended, by class and outcome; each prompt of a batch is one, with all its choices (n).",
            ("slo_class", "outcome"),
            registry=registry,
        )
        self._rejected = Counter(
            "twinpool_requests_rejected",
            "Requests turned away before any worker had them, by class and reason.",
            ("slo_class", "reason"),
            registry=registry,
        )
        self._gaps = GapHistogram("twinpool_itl_seconds", "Seconds between two outputs of a request at the proxy.")
        registry.register(self._gaps)

    def open(self, standing: Standing) -> Account:
        """The account of a request that has arrived."""
        slo = standing.slo
        return Account(slo, GapCounts() if slo.name == PROBE.name else self._gaps.of(slo.name))

    def close(self, account: Account, party: Party | None = None) -> None:
        """The request has ended; what nobody told how it ended was given up by its client.

        `party`: that of the choices it is one of.
        """
        account.settle("aborted")
        if account.slo.name == PROBE.name or account.outcome is None:
            return
        outcome = account.outcome if party is None else party.ended(account.outcome)
        if outcome is None:
            return
        self.outcomes.setdefault(account.slo, Counts())[outcome] += 1
        self._requests.labels(account.slo.name, outcome).inc()

    def rejected(self, account: Account, reason: str) -> None:
        """The request was turned away."""
        account.settle("rejected")
        if account.slo.name != PROBE.name:
            self._rejected.labels(account.slo.name, reason).inc()

    def unregister(self) -> None:
        """Takes them out of the registry."""
        for collector in (self._requests, self._rejected, self._gaps):
            self._registry.unregister(collector)
