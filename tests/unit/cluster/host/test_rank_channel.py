"""The host's port for its ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.host.rank_channel import MAX_FRAME_BYTES, RankChannel
from cluster.trust import call_with_key, new_key
from kvtransfer.host_messages import ExportStarted, FromRank, ImportClosed, PoolStats, RankReady, RankStats
from tests.unit.mutations import DEEP, mutated

STATS = RankStats(7, 1, 2, {"host": 5}, {"host": 0.5}, {"refused": 1}, 0, {"a": "b"}, {"zmq": 1}, {"zmq": 0.1}, {})
FROM_RANK = [
    STATS,
    ExportStarted("t"),
    ImportClosed("t", "loaded", "", "host", 5, 12, 0.1, 0.1, 0.1, 3),
    PoolStats(10, 5, 4, 1),
    RankReady(7, "ipc://there", "epoch", "f", {"a": "b"}, 10, 100, 1),
]


class Channel:
    """A channel that is being read, and a rank that is connected to it."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.heard: list[FromRank] = []
        self.channel = RankChannel(self.context, f"ipc://{directory}/ranks", self.heard.append)
        self.reading = asyncio.create_task(self.channel.run())
        self.rank = self.connect(directory)

    def connect(self, directory: Path) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{directory}/ranks")
        return socket

    async def say(self, *frames: bytes) -> None:
        await self.rank.send_multipart(frames)

    async def hear_out(self) -> None:
        """Until everything said so far was read."""
        await self.say(msgspec.msgpack.encode(ExportStarted("the last")))
        async with asyncio.timeout(5):
            while ExportStarted("the last") not in self.heard:
                assert not self.reading.done(), self.reading
                await asyncio.sleep(0.001)


@asynccontextmanager
async def channel_at(directory: Path) -> AsyncIterator[Channel]:
    made = Channel(directory)
    try:
        yield made
    finally:
        made.reading.cancel()
        made.rank.close()
        made.channel.close()
        made.context.term()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(mutated(FROM_RANK), min_size=30, max_size=30))
async def test_almost_messages_are_dropped_and_counted(tmp_path: Path, frames: list[bytes]) -> None:
    async with channel_at(tmp_path) as made:
        for frame in frames:
            await made.say(frame)
        await made.hear_out()
        assert made.channel.bad_frames + len(made.heard) == len(frames) + 1


async def test_what_no_reader_can_take_is_dropped_and_counted(tmp_path: Path) -> None:
    async with channel_at(tmp_path) as made:
        started = msgspec.msgpack.encode(ExportStarted("t"))
        await made.say(bytes([started[0] + 1]) + started[1:] + b"\xa4more" + DEEP)
        await made.say(started, b"one too many")
        await made.say(b"x" * (MAX_FRAME_BYTES + 1))
        await made.hear_out()
        assert made.channel.bad_frames == 3
        await made.say(b"x" * (2 * MAX_FRAME_BYTES + 1))  # ZMQ itself cuts this one off
        await asyncio.sleep(0.05)
        made.heard.clear()
        made.rank.close()
        made.rank = made.connect(tmp_path)
        await made.hear_out()
        assert made.channel.bad_frames == 3


async def test_ranks_on_other_nodes_show_the_key_and_strangers_are_counted() -> None:
    key, heard = new_key(), asyncio.Queue[FromRank]()
    context = zmq.asyncio.Context()
    channel = RankChannel(context, "tcp://127.0.0.1:0", heard.put_nowait, key)
    reading = asyncio.create_task(channel.run())
    ranks = [context.socket(zmq.DEALER) for _ in range(2)]
    for rank, its_key in zip(ranks, (new_key(), key), strict=True):
        # The stranger knows whom it calls, which is no secret.
        call_with_key(rank, channel.address, its_key)
        rank.set(zmq.CURVE_SERVERKEY, key.public.encode())
        rank.setsockopt(zmq.LINGER, 0)
        rank.connect(channel.address)
        await rank.send(msgspec.msgpack.encode(ExportStarted("t")))
    async with asyncio.timeout(60):
        assert await heard.get() == ExportStarted("t")
        while not channel.refused:  # noqa: ASYNC110 - counted when ZMQ's thread has told it
            await asyncio.sleep(0.01)
    assert heard.empty()
    reading.cancel()
    await asyncio.wait((reading,))
    for rank in ranks:
        rank.close()
    channel.close()
    context.term()
