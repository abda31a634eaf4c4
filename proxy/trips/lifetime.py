"""What happened to one request, and when: a list of (event, time). Metrics and reports derive from nothing else."""

from dataclasses import dataclass, field
from typing import Literal

from proxy.flights.events import LegKind

LifetimeEvent = Literal[
    "arrived",
    "received",
    "placed",
    "prefill_submitted",
    "local_submitted",
    "prefill_started",
    "prefill_scheduled",
    "local_scheduled",
    "prefill_ended",
    "decode_submitted",
    "decode_scheduled",
    "first_output",
    "second_output",
    "handover_closed",
    "handover_loaded",
    "placed_anew",
    "continued",
    "finished",
    "failed",
    "aborted",
]


@dataclass(frozen=True, slots=True)
class FirstTokenParts:
    """Where the time to the first token went, in seconds; the parts sum to the whole."""

    front_end: float = 0.0
    """From the request's arrival in vLLM's front end to the dispatcher: templates and tokenizing."""
    proxy_queue: float = 0.0
    """Until it was placed."""
    lost_attempt: float = 0.0
    """From its first placement until it was placed anew, if a worker was lost."""
    prefill_queue: float = 0.0
    """From the last placement until the engine scheduled its first chunk."""
    prefill: float = 0.0
    """Until the proxy had the end of the prefill: the first token, or in exact mode the token that is dropped."""
    hand_off: float = 0.0
    """Exact mode: until the decode worker had the blocks."""
    decode_queue: float = 0.0
    """Exact mode: until the decode worker scheduled it."""
    first_step: float = 0.0
    """Exact mode: the step that sampled the first token."""

    def by_name(self) -> dict[str, float]:
        """In the order in which they pass."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def total_s(self) -> float:
        """Time to the first token at the proxy."""
        return sum(self.by_name().values())


@dataclass(frozen=True, slots=True)
class SecondTokenParts:
    """Where the time between token 1, of a prefill worker, and token 2, of a decode worker, went; in seconds."""

    hand_off: float
    """Until the decode worker had the blocks."""
    decode_queue: float
    """Until it scheduled the request."""
    decode_step: float


@dataclass(slots=True)
class Lifetime:
    """Times are those of the proxy's monotonic clock, in seconds."""

    events: list[tuple[LifetimeEvent, float]] = field(default_factory=list)
    first_from: LegKind | None = None
    """The leg that the first output came from."""
    _first_token: FirstTokenParts | None = None

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
        """None before the first output; the same ever after, whatever happens to the request later."""
        if self._first_token is None:
            self._first_token = self._part_first_token()
        return self._first_token

    def _part_first_token(self) -> FirstTokenParts | None:
        arrived, first = self.last("arrived"), self.last("first_output")
        if arrived is None or first is None:
            return None
        placements = [at for name, at in self.events if name == "placed"]
        anew = self.last("placed_anew")
        received = _within(arrived, self.last("received"), first, otherwise=arrived)
        first_placed = _within(received, placements[0] if placements else None, first, otherwise=received)
        given_up = _within(first_placed, anew, first, otherwise=first_placed)
        placed = _within(given_up, placements[-1] if placements else None, first, otherwise=given_up)
        told = {
            "front_end": received - arrived,
            "proxy_queue": (first_placed - received) + (placed - given_up),
            "lost_attempt": given_up - first_placed,
        }
        scheduled = self._since(placed, "local_scheduled" if self.first_from == "local" else "prefill_started")
        if scheduled is None:
            scheduled = self._since(placed, "prefill_scheduled")
        started = _within(placed, scheduled, first, otherwise=placed)
        told["prefill_queue"] = started - placed
        if self.first_from != "decode":
            return FirstTokenParts(**told, prefill=first - started)
        # Without an end of the prefill (its worker was lost), the decode worker has computed everything.
        ended = _within(started, self._since(placed, "prefill_ended"), first, otherwise=first)
        closed = _within(ended, self._since(placed, "handover_closed"), first, otherwise=ended)
        stepped = _within(closed, self._since(placed, "decode_scheduled"), first, otherwise=closed)
        return FirstTokenParts(
            **told,
            prefill=ended - started,
            hand_off=closed - ended,
            decode_queue=stepped - closed,
            first_step=first - stepped,
        )

    def second_token_parts(self) -> SecondTokenParts | None:
        """Of a request whose first output came from a prefill worker and whose second one has just come; else None."""
        first, second = self.last("first_output"), self.last("second_output")
        if first is None or second is None or self.first_from != "prefill":
            return None
        closed = _within(first, self.last("handover_closed"), second, otherwise=first)
        stepped = _within(closed, self.last("decode_scheduled"), second, otherwise=closed)
        return SecondTokenParts(closed - first, stepped - closed, second - stepped)

    def _since(self, start_s: float, event: LifetimeEvent) -> float | None:
        at = self.last(event)
        return at if at is not None and at >= start_s else None


def _within(low: float, at: float | None, high: float, *, otherwise: float) -> float:
    """`at` moved to between `low` and `high`: clocks of engines are mapped to the proxy's only roughly."""
    return min(max(at if at is not None else otherwise, low), high)
