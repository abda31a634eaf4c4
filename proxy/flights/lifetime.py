"""What happened to one request, and when: a list of (event, time). Metrics and reports derive from nothing else."""

from dataclasses import dataclass, field
from typing import Literal

LifetimeEvent = Literal[
    "arrived",
    "placed",
    "prefill_submitted",
    "prefill_started",
    "prefill_ended",
    "decode_submitted",
    "first_output",
    "second_output",
    "handover_closed",
    "placed_anew",
    "finished",
    "failed",
    "aborted",
]


@dataclass(frozen=True, slots=True)
class FirstTokenParts:
    """Where the time to the first token went, in seconds; the parts sum to `total_s`."""

    total_s: float
    queue_s: float
    """In the proxy: arrival to placement."""
    worker_queue_s: float
    """From placement until the prefill worker scheduled the first chunk (0 when it was local)."""
    prefill_s: float
    """The rest: prefill and the way back."""


@dataclass(slots=True)
class Lifetime:
    """Times are those of the proxy's monotonic clock, in seconds."""

    events: list[tuple[LifetimeEvent, float]] = field(default_factory=list)

    def note(self, event: LifetimeEvent, now_s: float) -> None:
        """Adds an event."""
        self.events.append((event, now_s))

    def last(self, event: LifetimeEvent) -> float | None:
        """When `event` happened last (a request may be placed twice)."""
        return next((at for name, at in reversed(self.events) if name == event), None)

    def between(self, start: LifetimeEvent, end: LifetimeEvent) -> float | None:
        """Seconds from the last `start` to the last `end`; None unless both happened, in this order."""
        begin, finish = self.last(start), self.last(end)
        return finish - begin if begin is not None and finish is not None and finish >= begin else None

    def first_token_parts(self) -> FirstTokenParts | None:
        """None before the first output."""
        arrived, first = self.last("arrived"), self.last("first_output")
        if arrived is None or first is None:
            return None
        placed = self.last("placed") or arrived
        started = self.last("prefill_started") or placed
        started = min(max(started, placed), first)
        return FirstTokenParts(first - arrived, placed - arrived, started - placed, first - started)
