"""Metrics of the prefix index: what workers told, and whether what it says comes true."""

import contextlib
import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.messages import CacheEvents

ODDITIES = ("missed", "replayed", "orphaned", "other_tier", "malformed")
"""Kinds that a host may report; others would be labels without end."""


class PrefixMetrics:
    """All of them. One per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._events = Counter(
            "twinpool_prefix_events",
            "What workers told of their prefix caches: blocks stored and removed, caches cleared, and what was odd.",
            ("worker", "kind"),
            registry=registry,
        )
        self._blocks = Gauge(
            "twinpool_prefix_index_blocks",
            "Different KV blocks that some worker's prefix cache is known to hold.",
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._unknown = Gauge(
            "twinpool_prefix_events_unknown",
            "1: what a worker's prefix cache holds is not fully known.",
            ("worker",),
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._tokens = Counter(
            "twinpool_prefix_tokens",
            "Prompt tokens expected and found in the cache of the worker that got the prompt, where it is known.",
            ("kind",),
            registry=registry,
        )

    def told(self, worker_id: str, events: CacheEvents) -> None:
        """Counts what a worker told of its prefix cache."""
        odd = {kind: count for kind, count in events.oddities.items() if kind in ODDITIES}
        counts = {"stored": len(events.stored), "removed": len(events.removed), "cleared": int(events.cleared), **odd}
        for kind, count in counts.items():
            if count:
                self._events.labels(worker_id, kind).inc(count)

    def show(self, num_blocks: int, worker_id: str, unknown: bool) -> None:
        """Blocks in the index, and whether a worker's cache is unknown."""
        self._blocks.set(num_blocks)
        self._unknown.labels(worker_id).set(unknown)

    def found(self, expected_tokens: int, found_tokens: int) -> None:
        """Compares what the index said of a prompt with what the engine found."""
        self._tokens.labels("expected").inc(expected_tokens)
        self._tokens.labels("found").inc(found_tokens)

    def forget_worker(self, worker_id: str) -> None:
        """A worker was removed."""
        for metric in (self._events, self._unknown):
            forget_worker(metric, worker_id)

    def unregister(self) -> None:
        """Takes them out of the registry."""
        for metric in (self._events, self._blocks, self._unknown, self._tokens):
            self._registry.unregister(metric)


def forget_worker(metric: Counter | Gauge | Histogram, worker_id: str) -> None:
    """Takes a worker's series out of a metric; those without the label `worker` stay as they are.

    With several API servers the files that they share cannot lose a series; there, gauges go to 0.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        with contextlib.suppress(ValueError):  # it has no such label
            metric.remove_by_labels({"worker": worker_id})
    elif isinstance(metric, Gauge):
        for sample in next(iter(metric.collect())).samples:
            if sample.labels.get("worker") == worker_id:
                metric.labels(**sample.labels).set(0)
