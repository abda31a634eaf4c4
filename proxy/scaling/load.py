"""How much work arrives, over several spans of time: a jump shows at once, a small change when it is certain."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

OF_LATE, LASTING = 3.0, 2.0
"""Standard errors that are taken for chance: of short times more, for there are more of them."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Work per second."""

    mean: float
    error: float
    """Standard error, for work that comes in independent pieces."""


@dataclass(frozen=True, slots=True)
class _Span:
    seconds: float
    work: float
    squares: float


class Load:
    """Of one kind of work. Remembers what came within `keep_s`."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._spans: deque[_Span] = deque()
        self._seconds = 0.0

    def add(self, seconds: float, work: float, squares: float) -> None:
        """So much work came within the last `seconds`; `squares`: the sum of the squares of its pieces."""
        self._spans.append(_Span(seconds, work, squares))
        self._seconds += seconds
        while self._spans and self._seconds - self._spans[0].seconds >= self._keep_s:
            self._seconds -= self._spans.popleft().seconds

    def over(self, span_s: float) -> Estimate:
        """The last `span_s`, or as much of them as has passed."""
        seconds = work = squares = 0.0
        for span in self._newest_first():
            if seconds >= span_s:
                break
            seconds, work, squares = seconds + span.seconds, work + span.work, squares + span.squares
        if not seconds:
            return Estimate(0.0, 0.0)
        return Estimate(work / seconds, sqrt(squares) / seconds)

    def _newest_first(self) -> Iterator[_Span]:
        return reversed(self._spans)

    def of_late(self, window_s: float) -> float:
        """What arrives now at least: the most that a short time is proof of."""
        short, window = self.over(window_s / 4), self.over(window_s)
        return max(0.0, short.mean - OF_LATE * short.error, window.mean - OF_LATE * window.error)

    @property
    def at_least(self) -> float:
        """On average over all that is remembered."""
        found = self.over(self._keep_s)
        return max(0.0, found.mean - LASTING * found.error)

    @property
    def at_most(self) -> float:
        """The same, with the error on the other side."""
        found = self.over(self._keep_s)
        return found.mean + LASTING * found.error


class Level:
    """Of something that is there, not that arrives: its average over time. Remembers `keep_s`."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._spans: deque[tuple[float, float]] = deque()
        self._seconds = 0.0

    def add(self, seconds: float, value: float) -> None:
        """It was there for the last `seconds`."""
        self._spans.append((seconds, value))
        self._seconds += seconds
        while self._spans and self._seconds - self._spans[0][0] >= self._keep_s:
            self._seconds -= self._spans.popleft()[0]

    def over(self, span_s: float) -> float:
        """The average of the last `span_s`, or of as much of them as has passed."""
        seconds = total = 0.0
        for span, value in reversed(self._spans):
            if seconds >= span_s:
                break
            seconds, total = seconds + span, total + span * value
        return total / seconds if seconds else 0.0
