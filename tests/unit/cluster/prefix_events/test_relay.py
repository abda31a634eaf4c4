"""From an engine's sockets to the proxy, with a publisher that can lose and damage what it says."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, Phase, given, settings

from cluster.messages import CacheEvents
from cluster.prefix_events import relay as relay_module
from cluster.prefix_events import teller
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.engine_events import END, AllBlocksCleared, BlockStored
from cluster.prefix_events.relay import CacheRelay
from cluster.prefix_events.teller import CacheTeller
from tests.unit.cluster.prefix_events.test_cached_blocks import BLOCK, ours, removed, stored
from tests.unit.mutations import DEEP, mutated


class Publisher:
    """Speaks as vLLM's does; what it keeps for later questions is up to the test."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.live = context.socket(zmq.PUB)
        self.replay = context.socket(zmq.ROUTER)
        for socket, name in ((self.live, "events"), (self.replay, "replay")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"ipc://{directory}/{name}")
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.mute = False
        self._seq = 0
        self._answers = asyncio.create_task(self._answer())

    async def publish(self, *events: Any, lose: bool = False, payload: bytes | None = None) -> None:
        batch = payload if payload is not None else msgspec.msgpack.encode([0.0, events, 0])
        self.kept.append((self._seq, batch))
        if not lose:
            await self.live.send_multipart([b"", self._seq.to_bytes(8, "big"), batch])
        self._seq += 1

    async def _answer(self) -> None:
        while True:
            identity, _, start = await self.replay.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, batch in self.kept if not self.mute else ():
                if seq >= self.asked[-1]:
                    await self.replay.send_multipart([identity, b"", b"", seq.to_bytes(8, "big"), batch])
            if not self.mute:
                await self.replay.send_multipart([identity, b"", b"", END, b""])

    def close(self) -> None:
        self._answers.cancel()
        self.live.close()
        self.replay.close()


class Made:
    """A relay, its publisher, and a proxy that follows what it is told."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.publisher = Publisher(context, directory)
        self.told: list[CacheEvents] = []
        self.told_at_s: list[float] = []
        self.held: set[int] = set()
        self.teller = CacheTeller("epoch", self._hear)
        addresses = (f"ipc://{directory}/events", f"ipc://{directory}/replay")
        self.relay = CacheRelay(context, *addresses, CachedBlocks(BLOCK, 100), self.teller)

    def _hear(self, message: CacheEvents) -> None:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=CacheEvents)
        self.told.append(message)
        self.told_at_s.append(time.monotonic())
        self.held = ((set() if message.cleared else self.held) - set(message.removed)) | set(message.stored)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@asynccontextmanager
async def made_at(directory: Path, *, begun: bool = True) -> AsyncIterator[Made]:
    with zmq.asyncio.Context() as context:
        made = Made(context, directory)
        running = asyncio.create_task(made.relay.run())
        try:
            if begun:
                made.teller.begin()
            # Its first question shows that it runs; its subscription was on the way before.
            await made.until(lambda: made.publisher.asked == [0])
            await asyncio.sleep(0.05)
            yield made
        finally:
            running.cancel()
            await asyncio.wait([running])
            made.publisher.close()


async def test_what_the_engine_stores_and_removes_reaches_the_proxy(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        await made.publisher.publish(stored([71, 72], [1, 2, 3, 4]))
        await made.until(lambda: made.held == set(ours(1, 2, 3, 4)))
        await made.publisher.publish(removed(72))
        await made.until(lambda: made.held == set(ours(1, 2)))
        assert [message.seq for message in made.told] == list(range(len(made.told)))
        assert all(message.known for message in made.told)
        assert made.publisher.asked == [0], "only about what came before it listened"


async def test_news_in_quick_succession_are_told_together(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        for i in range(50):
            await made.publisher.publish(stored([i], [i, i]))
        await made.until(lambda: len(made.held) == 50)
        assert len(made.told) <= 4, "everything at first, the first news, and one or two bundles"


async def test_batches_that_were_missed_are_fetched(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        await made.publisher.publish(stored([71], [1, 2]))
        await made.publisher.publish(stored([72], [3, 4], parent=71), lose=True)
        await made.publisher.publish(removed(71), lose=True)
        await made.publisher.publish(stored([73], [5, 6]))
        await made.until(lambda: made.held == {ours(1, 2, 3, 4)[1], *ours(5, 6)})
        assert made.publisher.asked == [0, 1]
        assert all(message.known for message in made.told)
        assert sum(message.oddities.get("replayed", 0) for message in made.told) == 3


async def test_what_can_be_had_no_more_makes_the_cache_unknown_until_it_is_cleared(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        await made.publisher.publish(stored([71], [1, 2]))
        await made.until(lambda: made.held)
        await made.publisher.publish(removed(71), lose=True)
        made.publisher.kept.clear()
        await made.publisher.publish(stored([73], [5, 6]))
        await made.until(lambda: made.held == set(ours(5, 6)))
        assert not made.told[-1].known
        await made.publisher.publish(AllBlocksCleared())
        await made.until(lambda: made.told[-1].known)
        assert made.held == set()


async def test_an_engine_that_does_not_answer_makes_the_cache_unknown(tmp_path: Path) -> None:
    with patch.object(relay_module, "REPLAY_TIMEOUT_S", 0.1):
        async with made_at(tmp_path) as made:
            made.publisher.mute = True
            await made.publisher.publish(stored([71], [1, 2]), lose=True)
            await made.publisher.publish(stored([73], [5, 6]))
            await made.until(lambda: made.held == set(ours(5, 6)))
            assert not made.told[-1].known


async def test_a_proxy_is_told_everything_when_it_begins_and_nothing_while_there_is_none(tmp_path: Path) -> None:
    async with made_at(tmp_path, begun=False) as made:
        await made.publisher.publish(*[stored([i], [i, i]) for i in range(5)])
        await asyncio.sleep(0.05)
        assert made.told == []
        with patch.object(teller, "MAX_BLOCKS_PER_MESSAGE", 2):
            made.teller.begin()
        assert len(made.held) == 5
        assert [(message.seq, message.cleared) for message in made.told] == [(0, True), (1, False), (2, False)]
        made.teller.pause()
        await made.publisher.publish(stored([9], [9, 9]))
        await asyncio.sleep(0.05)
        assert len(made.told) == 3
        made.teller.begin()
        assert len(made.held) == 6


async def test_a_reset_by_call_is_told_before_the_engine_makes_a_step(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        await made.publisher.publish(stored([71], [1, 2]))
        await made.until(lambda: made.held)
        made.teller.engine_was_reset()
        assert made.held == set()
        assert made.told[-1].known


async def test_frames_that_are_no_events_are_dropped_and_counted(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        await made.publisher.live.send_multipart([b"x"])
        await made.publisher.live.send_multipart([b"", b"123", b""])
        await made.publisher.live.send_multipart([b"", b"\xff" * 8, b""])
        await made.publisher.publish(payload=b"\x80\x04K\x01.")  # a pickle
        await made.publisher.publish(payload=DEEP)
        await made.publisher.publish(stored([71], [1, 2]))
        await made.until(lambda: made.held == set(ours(1, 2)))
        assert sum(message.oddities.get("malformed", 0) for message in made.told) == 5
        assert not made.told[-1].known, "nobody knows what the two batches said"


class _Batch(msgspec.Struct):
    """As a map, which `mutated` changes; sent as the array that it stands for."""

    events: list[Any]


@settings(phases=[Phase.generate], max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frame=mutated([_Batch([stored([71, 72], [1, 2, 3, 4], extra_keys=[["s"], None]), removed(71)])]))
def test_almost_events_are_read_or_refused_and_nothing_else(frame: bytes) -> None:
    cached = CachedBlocks(BLOCK, 100)
    try:
        events = msgspec.msgpack.encode(msgspec.msgpack.decode(frame)["events"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError, ValueError):
        return
    try:
        batch = relay_module.read_batch(b"\x93\xcb" + bytes(8) + events + b"\x00")
    except relay_module.BadFrame:
        return
    cached.apply(batch.events)
    assert len(cached) <= sum(len(e.block_hashes) for e in batch.events if isinstance(e, BlockStored))


async def test_it_sleeps_while_the_engine_says_nothing(tmp_path: Path) -> None:
    async with made_at(tmp_path) as made:
        await made.publisher.publish(stored([71], [1, 2]))
        await made.until(lambda: made.held)
        await asyncio.sleep(0.12)
        before = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before < 0.05
