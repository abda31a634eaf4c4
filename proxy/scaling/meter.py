"""Counts what clients got, for the controller. One per dispatcher; called when a request starts its answer and when it
ends, never per token."""

from proxy.scaling.look import Measured


class Meter:
    """Since it was last taken."""

    def __init__(self) -> None:
        self.first_tokens = self.late = self.hopeless = self.streams = self.uneven = 0

    def first_token(self, ttft_s: float, target_s: float, alone_s: float) -> None:
        """An answer began; `alone_s`: what its prompt takes if nobody else is there."""
        if ttft_s > target_s and alone_s > target_s:
            self.hopeless += 1
            return
        self.first_tokens += 1
        self.late += ttft_s > target_s

    def turned_away(self) -> None:
        """A request was refused or gave up for want of room."""
        self.first_tokens += 1
        self.late += 1

    def stream(self, *, uneven: bool) -> None:
        """An answer ended; `uneven`: more of its gaps were long than its class allows."""
        self.streams += 1
        self.uneven += uneven

    def take(self) -> Measured:
        """What came since the last time."""
        taken = Measured(self.first_tokens, self.late, self.hopeless, self.streams, self.uneven)
        self.first_tokens = self.late = self.hopeless = self.streams = self.uneven = 0
        return taken
