"""Carries out a worker's drain: tells the proxy of it, waits until nothing is left, then leaves or changes the role."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from cluster.host.drain import Carried, Drain
from cluster.messages import LEAVE

log = logging.getLogger("twinpool.worker")


class DrainWatch:
    """Used on the host's event loop.

    `carried` says what the worker has, `tell` lets the proxy know of a change, `drop` aborts everything.
    """

    def __init__(
        self,
        worker_id: str,
        role: str,
        carried: Callable[[], Carried],
        tell: Callable[[], None],
        drop: Callable[[], Awaitable[None]],
    ) -> None:
        self.role = role
        """What the worker serves as."""
        self._worker_id = worker_id
        self._drain = Drain()
        self._carried = carried
        self._tell = tell
        self._drop = drop
        self._nudged = asyncio.Event()

    @property
    def goal(self) -> str:
        """`LEAVE`, a role, or empty when it does not drain."""
        return self._drain.goal

    @property
    def number(self) -> int:
        """How often it has begun."""
        return self._drain.number

    def order(self, goal: str, timeout_s: float) -> None:
        """Begins a drain, or changes the one that is on."""
        changed = self._drain.begin(goal, self.role, time.monotonic(), timeout_s)
        self._nudged.set()
        if changed:
            log.info("drain worker=%s goal=%s timeout_s=%g", self._worker_id, goal, timeout_s)
            self._tell()

    def nothing_more(self, number: int) -> None:
        """The proxy will send nothing more."""
        self._drain.nothing_more(number)
        self._nudged.set()

    def nudge(self) -> None:
        """Something happened that may end a drain."""
        self._nudged.set()

    async def run(self) -> str:
        """Returns when the worker is to leave, with the reason. Changes of the role happen inside."""
        while True:
            wait_s = self._drain.look_again_in_s(self._carried(), time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), wait_s)
            self._nudged.clear()
            carried = self._carried()
            stage = self._drain.stage(carried, time.monotonic())
            if stage not in ("done", "overdue"):
                continue
            how = "drained"
            if stage == "overdue":
                left = f"{carried.num_requests} requests and {carried.transfers_open} transfers"
                how = f"drained, but had no more time for {left}"
            if self._drain.goal == LEAVE:
                return how
            if stage == "overdue":
                await self._drop()
            log.info("role_taken worker=%s role=%s after=%s", self._worker_id, self._drain.goal, how)
            self.role = self._drain.goal
            self._drain.end()
            self._tell()
