"""Prometheus metrics that every API server process counts for itself; `/metrics` shows their sum."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class FrontEndMetrics:
    """One per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self.without_key = Counter(
            "twinpool_http_without_key",
            "HTTP requests turned away because the API key was missing or wrong.",
            registry=registry,
        )

    def unregister(self) -> None:
        """Takes them out of the registry, for the next server of this process."""
        self._registry.unregister(self.without_key)
