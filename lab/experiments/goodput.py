"""The highest rate at which enough requests keep both limits: bisection with confidence bounds. Pure."""

import math
from dataclasses import dataclass, field

_Z = 1.645
"""Of a one-sided test at 95 %."""


def wilson(good: int, offered: int, z: float = _Z) -> tuple[float, float]:
    """Bounds of the share behind `good` of `offered` (Wilson's score interval). (0, 1) when nothing was offered."""
    if not offered:
        return 0.0, 1.0
    share, spread = good / offered, z * z / offered
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / offered + spread / (4 * offered))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass
class GoodputSearch:
    """Finds the rate between `low` and `high` at which the share of good requests falls below `attained`.

    Each rate is run with one seed after the other until the bounds of its share are on one side of `attained`, or
    `seeds` are used up; then the share itself decides. The truth lies between `low` and `high`, which draw together by
    half (in the logarithm) with each rate.
    """

    low: float
    high: float
    attained: float = 0.9
    steps: int = 5
    """Rates tried between the two ends."""
    seeds: int = 3
    _counts: dict[float, list[tuple[int, int]]] = field(default_factory=dict)
    _steps_done: int = 0
    _decided: dict[float, bool] = field(default_factory=dict)

    def next_run(self) -> tuple[float, int] | None:
        """(rate, number of the seed from 0); None when it is known as well as asked for."""
        rate = self._rate()
        return None if rate is None else (rate, len(self._counts.get(rate, ())))

    def note(self, rate: float, good: int, offered: int) -> None:
        """The result of a run."""
        counts = self._counts.setdefault(rate, [])
        counts.append((good, offered))
        goods, all_ = sum(g for g, _ in counts), sum(n for _, n in counts)
        lowest, highest = wilson(goods, all_)
        if len(counts) >= self.seeds or lowest >= self.attained or highest < self.attained:
            self._decide(rate, holds=bool(all_) and goods / all_ >= self.attained)

    @property
    def bounds(self) -> tuple[float, float]:
        """Between these the rate lies. (0, low) if even the lowest is too much, (high, inf) if the highest is not."""
        if self._decided.get(self.low) is False:
            return 0.0, self.low
        if self._decided.get(self.high) is True:
            return self.high, math.inf
        return self.low, self.high

    def _rate(self) -> float | None:
        for end in (self.low, self.high):
            if end not in self._decided:
                return end
        if not self._decided[self.low] or self._decided[self.high] or self._steps_done >= self.steps:
            return None
        return math.sqrt(self.low * self.high)

    def _decide(self, rate: float, *, holds: bool) -> None:
        self._decided[rate] = holds
        if rate in (self.low, self.high):
            return
        self._steps_done += 1
        if holds:
            self.low = rate
        else:
            self.high = rate
