"""When each worker last got on with its work. Pure: time is passed in.

Progress is an output of any request, the first chunk of a prefill, and a growing count of computed tokens or fetched
bytes in a worker's reports: a long prompt is many chunks without an output. Empty steps of an engine are none. A worker
without work is always up to date.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.messages import WorkerLoad

LATE_BEAT_S = 5.0
"""A pause between beats beyond this is the proxy's own, and nobody's lack of progress."""


class Reporter(Protocol):
    """A worker, as far as progress goes."""

    @property
    def worker_id(self) -> str: ...
    @property
    def load(self) -> WorkerLoad | None: ...


@dataclass(frozen=True, slots=True)
class Stall:
    """A worker that has work and gets nowhere."""

    worker_id: str
    for_s: float


@dataclass(slots=True)
class _Mark:
    counters: tuple[str, int, int]
    """Epoch, tokens, bytes."""
    at_s: float


@dataclass(slots=True)
class Progress:
    """Of all living workers, as of the last beat."""

    _marks: dict[str, _Mark] = field(default_factory=dict)
    _beat_s: float | None = None

    def worked(self, worker_id: str, now_s: float) -> None:
        """An output, or the first chunk of a prefill, has come."""
        mark = self._marks.get(worker_id)
        if mark is not None:
            mark.at_s = now_s

    def beat(self, living: Iterable[Reporter], at_work: Collection[str], now_s: float) -> None:
        """Looks at the latest reports. `at_work`: ids of workers that have something to do."""
        pause_s = 0.0 if self._beat_s is None else now_s - self._beat_s
        self._beat_s = now_s
        marks: dict[str, _Mark] = {}
        for worker in living:
            counters = _counters(worker.load)
            mark = self._marks.get(worker.worker_id)
            if mark is None or mark.counters != counters or worker.worker_id not in at_work:
                mark = _Mark(counters, now_s)
            elif pause_s > LATE_BEAT_S:
                mark.at_s += pause_s
            marks[worker.worker_id] = mark
        self._marks = marks

    def without_progress_s(self) -> dict[str, float]:
        """Of every living worker: for how long it has got nowhere with its work; 0 if it has none."""
        if self._beat_s is None:
            return {}
        return {worker_id: max(0.0, self._beat_s - mark.at_s) for worker_id, mark in self._marks.items()}

    def stalled(self, after_s: float) -> list[Stall]:
        """Workers that have had something to do for so long and got nowhere."""
        return [Stall(worker_id, for_s) for worker_id, for_s in self.without_progress_s().items() if for_s > after_s]


def _counters(load: WorkerLoad | None) -> tuple[str, int, int]:
    return (load.epoch, load.tokens_computed, sum(load.bytes_in.values())) if load is not None else ("", 0, 0)
