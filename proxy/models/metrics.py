"""Prometheus metrics of the front, prefixed `twinpool_front_`. Those of a model are at `/models/NAME/metrics`."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.models.residents import Resident, State

_SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class FrontMetrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"twinpool_front_{name}", help_, labels, registry=registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(f"twinpool_front_{name}", help_, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests passed on to a model, by the status of its reply.", "model", "status"
        )
        self.broken = counter("requests_broken", "Requests of which a model's cluster broke off.", "model")
        self.abandoned = counter("requests_abandoned", "Requests whose client left before the end.", "model")
        self.rejected = counter(
            "requests_rejected", "Requests that the front answered with an error.", "model", "reason"
        )
        self.starts = counter("starts", "Starts of a model's cluster.", "model")
        self.failures = counter("failures", "Ends of a model's cluster that nobody had asked for.", "model")
        self.stops = counter(
            "stops", "Clusters stopped, and why: evicted, idle, removed, displaced, stuck.", "model", "reason"
        )
        self.sleeps = counter("sleeps", "Clusters put to sleep, and why: evicted, idle.", "model", "reason")
        self.wakes = counter("wakes", "Clusters woken.", "model")
        self.wake_seconds = Histogram(
            "twinpool_front_wake_seconds", "Seconds from waking to serving.", ("model",),
            registry=registry, buckets=(0.1, 0.25, 0.5, *_SECONDS),
        )  # fmt: skip
        self.start_seconds = Histogram(
            "twinpool_front_start_seconds", "Seconds from start to serving.", ("model",),
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._running = gauge("requests_running", "Requests that a model has.", "model")
        self._waiting = gauge("requests_waiting", "Requests that wait until a model is up.", "model")
        self._state = gauge("model_state", "1 for the state that a model is in.", "model", "state")
        self._used = gauge("capacity_used", "Cost of the models that have processes and do not sleep.")

    def text(self, residents: Iterable[Resident], used: int) -> bytes:
        """Everything, in Prometheus' text format."""
        for metric in (self._running, self._waiting, self._state):
            metric.clear()
        for resident in residents:
            self._running.labels(resident.name).set(len(resident.running))
            self._waiting.labels(resident.name).set(len(resident.waiting))
            for state in State:
                self._state.labels(resident.name, state.value).set(resident.state is state)
        self._used.set(used)
        return bytes(generate_latest(self._registry))
