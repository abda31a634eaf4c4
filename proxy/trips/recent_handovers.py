"""What is remembered of hand-overs, for `twinpool status` and the demonstration."""

from collections import Counter

from cluster.messages import HandoverClosed
from cluster.status import LastRequest, LinkStatus
from proxy.trips.trip import Trip


class RecentHandovers:
    """The last request that was handed over, and totals since the start."""

    def __init__(self) -> None:
        self.last: LastRequest | None = None
        self.outcomes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._copy_s: dict[str, float] = {}
        self._unfinished: tuple[str, HandoverClosed] | None = None

    def closed(self, trip: Trip, closed: HandoverClosed) -> None:
        """A hand-over ended."""
        self.outcomes[closed.outcome] += 1
        if closed.failure_kind:
            self.failures[closed.failure_kind] += 1
        if closed.link:
            self._bytes[closed.link] += closed.bytes_moved
            self._copy_s[closed.link] = self._copy_s.get(closed.link, 0.0) + closed.copy_s
        if closed.outcome == "cancelled":
            return
        self._unfinished = (trip.request_id, closed)
        self.first_output(trip)

    def first_output(self, trip: Trip) -> None:
        """A request's first output was given to the client, possibly after its hand-over had ended."""
        parts = trip.lifetime.first_token_parts()
        if self._unfinished is None or self._unfinished[0] != trip.request_id or parts is None:
            return
        closed, self._unfinished = self._unfinished[1], None
        self.last = LastRequest(
            prompt_tokens=trip.shape.num_prompt_tokens,
            ttft_s=parts.total_s,
            handover_s=closed.done_to_loaded_s,
            bytes_moved=closed.bytes_moved,
            link=closed.link,
            outcome=closed.outcome,
            request_id=trip.label,
        )

    def links(self) -> list[LinkStatus]:
        """Totals per link."""
        return [LinkStatus(link, moved, self._copy_s[link]) for link, moved in sorted(self._bytes.items())]
