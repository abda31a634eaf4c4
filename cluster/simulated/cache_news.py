"""Tells the proxy what a simulated worker's prefix cache holds, as `cluster.prefix_events.relay` does for an engine."""

import asyncio
from collections.abc import Callable

from cluster.messages import CacheEvents
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.teller import CacheTeller


class CacheNewsTeller(CacheTeller):
    """For one proxy at a time; `tell` sends a message without waiting. `cached` is changed by the engine."""

    def __init__(self, cached: CachedBlocks, epoch: str, tell: Callable[[CacheEvents], None]) -> None:
        super().__init__(epoch, tell)
        self.watch(cached)
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Something may have changed."""
        self._nudged.set()

    async def run(self) -> None:
        """Passes on what changed, until cancelled."""
        while True:
            await self._nudged.wait()
            self._nudged.clear()
            if (patience_s := self.patience_s()) is not None:
                await asyncio.sleep(patience_s)
                self.pass_on()
