"""Reads an engine's event sockets: notices gaps, fetches what was missed, and lets the proxy be told.

One task owns both sockets. It sleeps until the engine says something.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio

from cluster.frames import BadFrame
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.engine_events import END, MAX_BATCH_BYTES, read_batch
from cluster.prefix_events.teller import CacheTeller

log = logging.getLogger("twinpool.worker")

REPLAY_TIMEOUT_S = 5.0
_MAX_GAP: Final = 1 << 32
"""A number further ahead is not one of the engine's."""
_NUMBER_BYTES: Final = 8


class CacheRelay:
    """Reads the events of one engine that has just started.

    Args:
        context: of the running loop.
        event_address, replay_address: where the engine publishes and repeats.
        cached: what the engine holds; changed here.
        teller: tells the proxy.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        event_address: str,
        replay_address: str,
        cached: CachedBlocks,
        teller: CacheTeller,
    ) -> None:
        self._context = context
        self._event_address = event_address
        self._replay_address = replay_address
        self._cached = cached
        self._teller = teller
        self._expected = 0
        """Number of the engine's next batch."""

    async def run(self) -> None:
        """Reads until cancelled."""
        self._teller.watch(self._cached)
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
                    self._teller.pass_on()

    def _patience_ms(self) -> int | None:
        patience_s = self._teller.patience_s()
        return None if patience_s is None else round(patience_s * 1e3)

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
