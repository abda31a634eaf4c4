"""How one request fares against its class.

A gap is the time between two outputs of a request at the proxy; where an engine gives several tokens at once, they are
one output. The target for gaps is met if at most one of a hundred is longer, so with less than a hundred none may be.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from proxy.scheduling.slo import SloClass

Outcome = Literal["attained", "missed_ttft", "missed_itl", "missed_both", "rejected", "failed", "aborted"]


class Gaps(Protocol):
    """Where gaps are counted."""

    def add(self, gap_s: float) -> None: ...


@dataclass(slots=True)
class Account:
    """Of one request. Times are those of the proxy's monotonic clock."""

    slo: SloClass
    gaps: Gaps
    num_gaps: int = 0
    num_long: int = 0
    """Gaps longer than the class's target."""
    ttft_s: float | None = None
    outcome: Outcome | None = None
    _last_s: float | None = None

    def output(self, now_s: float) -> None:
        """An output goes to the client. Called for every token."""
        last_s = self._last_s
        self._last_s = now_s
        if last_s is None:
            return
        gap_s = now_s - last_s
        self.num_gaps += 1
        if gap_s > self.slo.itl_s:
            self.num_long += 1
        self.gaps.add(gap_s)

    def pause(self) -> None:
        """It waits for its client (streamed input); what comes next is no gap."""
        self._last_s = None

    def answered(self) -> None:
        """The client has its whole answer."""
        late = self.ttft_s is not None and self.ttft_s > self.slo.ttft_s
        uneven = self.num_long * 100 > self.num_gaps
        self.settle(
            "missed_both" if late and uneven else "missed_ttft" if late else "missed_itl" if uneven else "attained"
        )

    def settle(self, outcome: Outcome) -> None:
        """How it ended. The first word counts: what follows is only tidying up."""
        if self.outcome is None:
            self.outcome = outcome
