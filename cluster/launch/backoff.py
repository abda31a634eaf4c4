"""How long to wait before something that keeps failing is tried again. Pure: time is passed in.

One rule for workers (`cluster/fleet/restarts.py`), for the watchdog (`guard.py`) and for models
(`proxy/models/residency.py`), each with its own numbers.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Counts failures in a row. One that comes after a steady time is the first of a new row."""

    pauses_s: tuple[float, ...]
    """After the first failure in a row, after the second and so on; the last one also after more."""
    steady_s: float
    failures: int = 0
    """In a row, up to now."""

    def failed(self, lasted_s: float) -> float:
        """Seconds until the next try. `lasted_s`: how long it did its work; 0 if it never came so far."""
        self.failures = 1 if lasted_s >= self.steady_s else self.failures + 1
        return self.pauses_s[min(self.failures, len(self.pauses_s)) - 1]

    def forget(self) -> None:
        """The next failure is the first of a row."""
        self.failures = 0
