"""From the engine's event sockets to the proxy: notices gaps, fetches what was missed, passes on net changes.

One task owns both sockets. It sleeps until the engine says something; then it passes news on at once, and while more
keeps coming ten times a second.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Final

import zmq
import zmq.asyncio

from cluster.frames import BadFrame
from cluster.messages import MAX_BLOCKS_PER_MESSAGE, CacheEvents
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.engine_events import END, MAX_BATCH_BYTES, read_batch

log = logging.getLogger("twinpool.worker")

RELAY_EVERY_S = 0.1
REPLAY_TIMEOUT_S = 5.0
_MAX_GAP: Final = 1 << 32
"""A number further ahead is not one of the engine's."""
_NUMBER_BYTES: Final = 8


class CacheRelay:
    """Reads one engine's events for one proxy at a time.

    Args:
        context: of the running loop.
        event_address, replay_address: where the engine publishes and repeats.
        epoch: of this host.
        tell: sends a message to the proxy, without waiting.

    Until `run`, and without it, nothing is told.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        event_address: str,
        replay_address: str,
        epoch: str,
        tell: Callable[[CacheEvents], None],
    ) -> None:
        self._context = context
        self._event_address = event_address
        self._replay_address = replay_address
        self._epoch = epoch
        self._tell = tell
        self._cached = CachedBlocks(block_size=1, max_blocks=0)
        self._running = False
        self._seq: int | None = None
        """Of the next message; None while there is no proxy."""
        self._expected = 0
        """Number of the engine's next batch."""
        self._told_at_s = 0.0

    # --- towards the proxy -----------------------------------------------------------------------

    def begin(self) -> None:
        """A proxy that knows nothing: tells everything."""
        self._seq = 0
        if self._running:
            news = self._cached.take_news()
            self._say(self._cached.all_blocks(), (), True, news.known)

    def pause(self) -> None:
        """There is no proxy."""
        self._seq = None

    def engine_was_reset(self) -> None:
        """A call emptied the prefix cache. An idle engine says so only with its next step."""
        if self._running:
            self._cached.clear()
            self._pass_on()

    def _pass_on(self) -> None:
        news = self._cached.take_news()
        self._say(news.stored, news.removed, news.cleared, news.known)

    def _say(self, stored: Sequence[int], removed: Sequence[int], cleared: bool, known: bool) -> None:
        if self._seq is None:
            return
        self._told_at_s = time.monotonic()
        oddities = dict(self._cached.oddities)
        self._cached.oddities.clear()
        for some_stored, some_removed in zip_longest(_pieces(stored), _pieces(removed)):
            message = CacheEvents(
                self._epoch, self._seq, some_stored or [], some_removed or [], cleared, known, oddities
            )
            self._tell(message)
            self._seq += 1
            cleared, oddities = False, {}

    # --- from the engine -------------------------------------------------------------------------

    async def run(self, cached: CachedBlocks) -> None:
        """Reads until cancelled. `cached`: of an engine that has just started; changed only here."""
        self._cached, self._running = cached, True
        if self._seq is not None:
            self.begin()
        with self._context.socket(zmq.SUB) as live:
            live.setsockopt(zmq.LINGER, 0)
            live.setsockopt(zmq.RCVHWM, 0)  # what is lost here would have to be fetched again
            live.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            live.connect(self._event_address)
            live.subscribe(b"")
            await self._fetch_missed()  # what the engine said before anybody listened
            while True:
                if await live.poll(self._patience_ms()):
                    await self._take(await live.recv_multipart())
                if self._patience_ms() == 0:
                    self._pass_on()

    def _patience_ms(self) -> int | None:
        """How long to wait for more before the news is passed on; None if there is none, or nobody to tell."""
        if self._seq is None or not (self._cached.has_news or self._cached.oddities):
            return None
        return max(0, round((self._told_at_s + RELAY_EVERY_S - time.monotonic()) * 1e3))

    async def _take(self, frames: Sequence[bytes]) -> None:
        seq = self._number(frames)
        if seq is None or seq < self._expected:
            return  # the latter was fetched already
        if seq > self._expected:
            log.info("cache_events_missed expected=%d got=%d", self._expected, seq)
            await self._fetch_missed()
        if seq >= self._expected:
            self._apply(seq, frames[2])

    def _number(self, frames: Sequence[bytes]) -> int | None:
        if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
            seq = int.from_bytes(frames[1], "big")
            if seq - self._expected < _MAX_GAP:
                return seq
        self._cached.oddities["malformed"] += 1
        log.warning("bad_cache_event_frames frames=%d", len(frames))
        return None

    def _apply(self, seq: int, payload: bytes) -> None:
        if seq > self._expected:
            log.warning("cache_events_lost from=%d to=%d", self._expected, seq)
            self._cached.miss()
        self._expected = seq + 1
        try:
            batch = read_batch(payload)
        except BadFrame as error:
            self._cached.oddities["malformed"] += 1
            self._cached.miss()
            log.warning("bad_cache_event error=%s", error)
            return
        self._cached.apply(batch.events)

    async def _fetch_missed(self) -> None:
        """Takes everything from the expected number on that the engine still has."""
        # A socket per question, so that late answers to an earlier one cannot be taken for its own.
        with self._context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.setsockopt(zmq.RCVHWM, 0)
            replay.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            replay.connect(self._replay_address)
            try:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    await replay.send_multipart([b"", self._expected.to_bytes(_NUMBER_BYTES, "big")])
                    while (frames := await replay.recv_multipart())[2:3] != [END]:
                        seq = self._number(frames[1:])
                        if seq is not None and seq >= self._expected:
                            self._cached.oddities["replayed"] += 1
                            self._apply(seq, frames[3])
            except TimeoutError:
                log.warning("cache_events_not_replayed within_s=%g", REPLAY_TIMEOUT_S)


def _pieces(hashes: Sequence[int]) -> Iterator[list[int]]:
    """At least one, perhaps empty."""
    for start in range(0, max(1, len(hashes)), MAX_BLOCKS_PER_MESSAGE):
        yield list(hashes[start : start + MAX_BLOCKS_PER_MESSAGE])
