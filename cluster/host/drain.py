"""When a worker that takes no new requests may leave or change its role. Pure: time is passed in.

Two things must hold. Nothing is left here: no request, no transfer of any rank. And nothing more will come: the proxy
knows which requests are placed on this worker although they have not reached it yet, so it has the last word.
"""

from dataclasses import dataclass
from typing import Literal

from cluster.messages import LEAVE

SETTLE_S = 1.5
"""Ranks count their transfers once a second, so after the last request one more count is waited for."""

Stage = Literal["none", "waits", "done", "overdue"]


@dataclass(frozen=True, slots=True)
class Carried:
    """What the worker has at one moment."""

    num_requests: int
    transfers_open: int
    """Exports and imports, as the ranks last counted them."""
    last_work_s: float
    """When a request last came or ended."""
    has_proxy: bool
    """Without a proxy nobody can send anything."""


class Drain:
    """The drains of one life of a worker, one at a time."""

    def __init__(self) -> None:
        self.goal = ""
        """`LEAVE`, a role, or empty when it does not drain."""
        self.number = 0
        """How often it has begun."""
        self._deadline_s = 0.0
        self._nothing_more = False

    def begin(self, goal: str, role: str, now_s: float, timeout_s: float) -> bool:
        """Takes an order; True if the proxy must hear of a change.

        The same order again can only shorten the time. Who leaves takes no other order. The present `role` as goal
        ends a drain towards the other one.
        """
        if self.goal == goal:
            self._deadline_s = min(self._deadline_s, now_s + timeout_s)
            return False
        if self.goal == LEAVE or (goal == role and not self.goal):
            return False
        self.goal = "" if goal == role else goal
        self.number += bool(self.goal)
        self._deadline_s = now_s + timeout_s
        self._nothing_more = False
        return True

    def nothing_more(self, number: int) -> None:
        """The proxy will send no request any more; said of an earlier drain it means nothing."""
        self._nothing_more = self._nothing_more or (bool(self.goal) and number == self.number)

    def end(self) -> None:
        """The new role is taken."""
        self.goal = ""

    def stage(self, carried: Carried, now_s: float) -> Stage:
        """What is to be done now."""
        if not self.goal:
            return "none"
        settled = now_s - carried.last_work_s >= SETTLE_S
        if settled and self._is_empty(carried):
            return "done"
        return "overdue" if now_s >= self._deadline_s else "waits"

    def look_again_in_s(self, carried: Carried, now_s: float) -> float | None:
        """After how long `stage` may say something else although nothing happened; None: never."""
        if not self.goal:
            return None
        wake_s = self._deadline_s
        if self._is_empty(carried):
            wake_s = min(wake_s, carried.last_work_s + SETTLE_S)
        return max(0.0, wake_s - now_s)

    def _is_empty(self, carried: Carried) -> bool:
        nothing_comes = self._nothing_more or not carried.has_proxy
        return nothing_comes and carried.num_requests == carried.transfers_open == 0
