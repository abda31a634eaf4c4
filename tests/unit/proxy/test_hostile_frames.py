"""Whatever arrives at the workers' port: what is no message is dropped and counted, and nothing else happens."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cluster import messages
from proxy import peer_socket
from tests.unit.mutations import DEEP, mutated
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, mini_cluster, until

FACTS = messages.EngineFacts("another model", 4096, 16, 1000, 8, 512, 1, "bfloat16", ["generate"])
RANKS = [messages.RankAddress(0, "ipc://somewhere", "epoch")]
HELLO = messages.WorkerHello(
    messages.PROTOCOL_VERSION, "decode-0", "decode", "epoch", 0, 1, "here", FACTS, RANKS, "f1", {"layout": "f1"}
)
LOAD = messages.WorkerLoad(
    "decode-0", "epoch", 0, 0, 1000, 990, 10, 0, 0, 0, {"host": 5}, {"host": 0.5}, {"refused": 1}, 0, {"a": "b"},
    {"host": 5}, {"host": 0.5}, {"held": 1},
)  # fmt: skip
NEWS = [
    messages.Outputs("epoch"),
    messages.PrefillStarted("t"),
    messages.HandoverClosed("t", "loaded", "", "host", 1, 1, 0.0, 0.0, 0.0, 0),
    messages.CacheEvents("epoch", 0, [1, 2], [3], oddities={"missed": 1}),
    messages.UtilityReply(99, "", msgspec.Raw(b"\xc0")),
    messages.Goodbye("decode-0", "another epoch", "leaving"),
]
TIMES = settings(phases=[Phase.generate], max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def answers(cluster: MiniCluster) -> bool:
    return (await cluster.run()).tokens[0] == generate(PROMPT, 5)


@pytest.fixture
def stranger() -> Any:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket.close()
    context.term()


@TIMES
@given(frames=st.lists(mutated([LOAD, *NEWS]), min_size=30, max_size=30))
async def test_almost_messages_of_a_stranger_change_nothing(tmp_path: Path, frames: list[bytes]) -> None:
    async with mini_cluster(tmp_path) as cluster:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(cluster.address)
            for frame in frames:
                await socket.send(frame)
            await until(lambda: cluster.metric("bad_frames_total") == len(frames))
        assert await answers(cluster)
        assert len(cluster.pool.roster.alive()) == 2


@TIMES
@given(frames=st.lists(mutated([HELLO, LOAD, *NEWS]), min_size=30, max_size=30), extra=st.binary(max_size=20))
async def test_almost_messages_of_a_worker_do_not_stop_the_proxy(
    tmp_path: Path, frames: list[bytes], extra: bytes
) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["decode-0"]
        epoch = msgspec.msgpack.encode(worker.epoch)
        for frame in frames:
            await worker.socket.send_multipart([frame.replace(b"\xa5epoch\xa5epoch", b"\xa5epoch" + epoch)])
            await worker.socket.send_multipart([msgspec.msgpack.encode(messages.Outputs(worker.epoch)), extra])
        await worker.hello()  # whatever it said of itself before
        dispatcher = cluster.client.dispatcher
        with patch.object(dispatcher, "on_prefill_started", wraps=dispatcher.on_prefill_started) as started:
            await worker.say(messages.PrefillStarted("the last"))
            await until(lambda: "the last" in [heard.args[1] for heard in started.call_args_list])
        assert await answers(cluster)


async def test_what_cannot_be_read_or_is_too_large_is_dropped_and_counted(
    tmp_path: Path, stranger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_socket, "MAX_FRAME_BYTES", 32 << 20)
    async with mini_cluster(tmp_path) as cluster:
        stranger.connect(cluster.address)
        started = msgspec.msgpack.encode(messages.PrefillStarted("t"))
        await stranger.send(bytes([started[0] + 1]) + started[1:] + b"\xa4more" + DEEP)
        await stranger.send(b"x" * (17 << 20))
        await until(lambda: cluster.metric("bad_frames_total") == 2)
        await stranger.send(b"x" * (33 << 20))  # ZMQ itself cuts this one off
        await asyncio.sleep(0.05)
        assert cluster.metric("bad_frames_total") == 2
        assert await answers(cluster)


async def test_a_bad_frame_of_a_worker_is_logged_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "twinpool.proxy")
    async with mini_cluster(tmp_path) as cluster:
        await cluster["decode-0"].socket.send(b"\xc1")
        await until(lambda: cluster.metric("bad_frames_total") == 1)
    assert "bad_frame worker=decode-0 " in caplog.text
