"""Tells the proxy what a simulated worker's prefix cache holds, as `cluster.prefix_events.relay` does for an engine."""

import asyncio
from collections.abc import Callable, Sequence

from cluster.messages import MAX_BLOCKS_PER_MESSAGE, CacheEvents
from cluster.simulated.engine.paged_engine import SimulatedEngine

_EVERY_S = 0.1


class CacheNewsTeller:
    """For one proxy at a time; `tell` sends a message without waiting."""

    def __init__(self, engine: SimulatedEngine, epoch: str, tell: Callable[[CacheEvents], None]) -> None:
        self._engine = engine
        self._epoch = epoch
        self._tell = tell
        self._seq: int | None = None
        """Of the next message; None while there is no proxy."""
        self._nudged = asyncio.Event()

    def begin(self) -> None:
        """A proxy that knows nothing: tells everything."""
        self._seq = 0
        self._engine.take_cache_news()
        self._say(self._engine.cached_blocks(), (), cleared=True)

    def pause(self) -> None:
        """There is no proxy."""
        self._seq = None

    def nudge(self) -> None:
        """Something may have changed."""
        self._nudged.set()

    async def run(self) -> None:
        """Passes on net changes, ten times a second at most."""
        while True:
            await self._nudged.wait()
            self._nudged.clear()
            news = self._engine.take_cache_news()
            if news:
                self._say(sorted(news.stored), sorted(news.removed), news.cleared)
                await asyncio.sleep(_EVERY_S)

    def _say(self, stored: Sequence[int], removed: Sequence[int], cleared: bool) -> None:
        if self._seq is None:
            return
        size = MAX_BLOCKS_PER_MESSAGE
        for start in range(0, max(1, len(stored), len(removed)), size):
            piece = slice(start, start + size)
            self._tell(CacheEvents(self._epoch, self._seq, list(stored[piece]), list(removed[piece]), cleared))
            self._seq += 1
            cleared = False
