"""How many requests a decode worker generates for within the target, learned from its steps, and how many workers that
takes."""

from collections.abc import Iterable
from math import ceil, inf, sqrt

from proxy.scaling.look import Batch

FORGET = 0.995
"""Per observed batch."""
STEP_SHARE = 0.9
"""Of the target between two tokens that a planned step may take."""
KV_SHARE = 0.95
UNTRIED = 2.0
"""A batch more than so many times as large as any that was seen is not planned with."""
FIRST_BATCH = 8


class BatchCosts:
    """The seconds of a step as a line over the size of the batch, from weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0
        self._largest = FIRST_BATCH

    def observe(self, batches: Iterable[Batch]) -> None:
        """What workers do now."""
        for batch in batches:
            if batch.running < 1 or batch.step_s <= 0:
                continue
            n, t = batch.running, batch.step_s
            self._largest = max(self._largest, n)
            self._weight = self._weight * FORGET + 1
            self._n = self._n * FORGET + n
            self._t = self._t * FORGET + t
            self._nn = self._nn * FORGET + n * n
            self._nt = self._nt * FORGET + n * t

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of an empty step, and per request."""
        if not self._weight:
            return 0.0, 0.0
        n, t = self._n / self._weight, self._t / self._weight
        spread = self._nn / self._weight - n * n
        slope = (self._nt / self._weight - n * t) / spread if spread > 0.25 else 0.0
        # Neither can be less than nothing.
        slope = min(max(0.0, slope), t / n)
        return t - slope * n, slope

    def alone_s(self) -> float:
        """A step for one request: no number of workers makes it shorter."""
        fixed_s, each_s = self.line
        return fixed_s + each_s

    def most_at_once(self, itl_s: float) -> float:
        """Requests per worker whose steps keep within the target, as far as it is known."""
        fixed_s, each_s = self.line
        by_time = (itl_s * STEP_SHARE - fixed_s) / each_s if each_s > 0 else inf
        return max(1.0, min(by_time, UNTRIED * self._largest))


def fit_in_memory(batches: Iterable[Batch]) -> float:
    """Requests of the present kind for which a worker has room."""
    batches = list(batches)
    requests = sum(batch.requests for batch in batches)
    blocks = sum(batch.blocks_taken for batch in batches)
    total = sum(batch.blocks_total for batch in batches)
    most = min((batch.max_requests for batch in batches), default=0)
    if not requests or not blocks or not batches:
        return inf
    return max(1.0, min(most, KV_SHARE * total / len(batches) / (blocks / requests)))


def decode_workers(requests: float, per_worker: float, spread: float) -> int:
    """Workers for so many requests at a time, `spread` standard deviations more than on average."""
    if requests <= 0:
        return 0
    return ceil((requests + spread * sqrt(requests)) / per_worker - 1e-9)
