"""Tells the proxy what a simulated worker's prefix cache holds, as `cluster.prefix_events.relay` does for an engine."""

import asyncio

from cluster.prefix_events.teller import CacheTeller


class CacheNewsRunner:
    """Lets a teller pass on what changed, some time after it changed."""

    def __init__(self, teller: CacheTeller) -> None:
        self._teller = teller
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Something may have changed."""
        self._nudged.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._nudged.wait()
            self._nudged.clear()
            if (patience_s := self._teller.patience_s()) is not None:
                await asyncio.sleep(patience_s)
                self._teller.pass_on()
