"""Tells the proxy what an engine's prefix cache holds: everything at first, then net changes."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from cluster.messages import MAX_BLOCKS_PER_MESSAGE, CacheEvents
from cluster.prefix_events.cached_blocks import CachedBlocks

TELL_EVERY_S = 0.1
"""News are told at once, and while more keeps coming ten times a second: engines make a step every few milliseconds."""


class CacheTeller:
    """One engine's cache, told to one proxy at a time. Nothing is told before `watch`.

    Args:
        epoch: of this host.
        tell: sends a message to the proxy, without waiting.
    """

    def __init__(self, epoch: str, tell: Callable[[CacheEvents], None]) -> None:
        self._epoch = epoch
        self._tell = tell
        self._cached: CachedBlocks | None = None
        self._seq: int | None = None
        """Of the next message; None while there is no proxy."""
        self._told_at_s = 0.0

    def watch(self, cached: CachedBlocks) -> None:
        """From now on this is told."""
        self._cached = cached
        if self._seq is not None:
            self.begin()

    def begin(self) -> None:
        """There is a proxy that knows nothing: tells everything."""
        self._seq = 0
        if self._cached is not None:
            news = self._cached.take_news()
            self._say(self._cached, self._cached.all_blocks(), (), True, news.known)

    def pause(self) -> None:
        """There is no proxy."""
        self._seq = None

    def engine_was_reset(self) -> None:
        """A call emptied the prefix cache. An idle engine says so only with its next step."""
        if self._cached is not None:
            self._cached.clear()
            self.pass_on()

    def patience_s(self) -> float | None:
        """How long to wait for more before `pass_on`; None: nothing to tell, or nobody to tell it to."""
        cached = self._cached
        if self._seq is None or cached is None or not (cached.has_news or cached.oddities):
            return None
        return max(0.0, self._told_at_s + TELL_EVERY_S - time.monotonic())

    def pass_on(self) -> None:
        """Tells what changed."""
        if self._seq is not None and self._cached is not None:
            news = self._cached.take_news()
            self._say(self._cached, news.stored, news.removed, news.cleared, news.known)

    def _say(
        self, cached: CachedBlocks, stored: Sequence[int], removed: Sequence[int], cleared: bool, known: bool
    ) -> None:
        self._told_at_s = time.monotonic()
        seq = self._seq or 0
        oddities = dict(cached.oddities)
        cached.oddities.clear()
        for some_stored, some_removed in zip_longest(_pieces(stored), _pieces(removed)):
            self._tell(CacheEvents(self._epoch, seq, some_stored or [], some_removed or [], cleared, known, oddities))
            seq, cleared, oddities = seq + 1, False, {}
        self._seq = seq


def _pieces(hashes: Sequence[int]) -> Iterator[list[int]]:
    """At least one, perhaps empty."""
    for start in range(0, max(1, len(hashes)), MAX_BLOCKS_PER_MESSAGE):
        yield list(hashes[start : start + MAX_BLOCKS_PER_MESSAGE])
