"""A host's line to the proxy, on real sockets, with a host that only notes what it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from cluster import messages as wire
from cluster.config import LivenessConfig, TransferConfig
from cluster.host import proxy_line
from cluster.host.leaving import Left, until_it_leaves
from cluster.host.proxy_line import Introduction, Order, ProxyLine
from cluster.worker_settings import HostSettings

FACTS = wire.EngineFacts("m", 2048, 16, 100, 8, 512, 1, "bfloat16", ["generate"])


class FakeHost:
    num_requests = 1
    transfers_open = 0

    def __init__(self) -> None:
        self.obeyed: list[Order] = []
        self.drops = 0

    def introduction(self) -> Introduction:
        return Introduction(FACTS, [], "f", {})

    def load(self) -> wire.WorkerLoad:
        return wire.WorkerLoad("decode-0", "e", 0, 0, 1, 1, 0, 0, 0, 0, {}, {}, {}, 0, {})

    async def obey(self, order: Order, _frames: list[bytes]) -> None:
        self.obeyed.append(order)

    async def drop_everything(self) -> None:
        self.drops += 1


class Situation:
    """A line, its host and a proxy of the test's own."""

    def __init__(self, directory: Path, proxy_lost_after_s: float) -> None:
        self.host = FakeHost()
        settings = HostSettings(
            proxy_address=f"ipc://{directory}/proxy",
            runtime_dir=directory,
            model="m",
            transfer=TransferConfig(),
            liveness=LivenessConfig(heartbeat_s=0.02, proxy_lost_after_s=proxy_lost_after_s),
        )
        self.context = zmq.asyncio.Context()
        self.proxy = self.context.socket(zmq.ROUTER)
        self.proxy.bind(settings.proxy_address)
        self.line = ProxyLine(self.context, settings, "decode-0", "decode", self.host)
        self.stop = asyncio.Event()
        self.left: asyncio.Task[Left] | None = None
        self._identity = b""

    def begin(self) -> None:
        async def work(tasks: asyncio.TaskGroup) -> None:
            self.line.begin(tasks)

        self.left = asyncio.create_task(until_it_leaves("decode-0", self.stop, work))

    async def say(self, body: wire.ToWorker | bytes) -> None:
        frame = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        await self.proxy.send_multipart([self._identity, frame])

    async def hear(self, kind: type, **fields: Any) -> Any:
        """The next message of this kind with these fields."""
        async with asyncio.timeout(10):
            while True:
                self._identity, body = await self.proxy.recv_multipart()
                message = msgspec.msgpack.decode(body, type=wire.FromWorker)
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    return message

    async def join(self, proxy_epoch: str) -> None:
        await self.hear(wire.WorkerHello)
        await self.say(wire.Welcome(proxy_epoch))
        await self.hear(wire.WorkerLoad)  # only who has read its welcome reports

    async def end(self) -> None:
        self.stop.set()
        if self.left is not None:
            await asyncio.wait_for(self.left, 10)
        await self.line.close("the test is over")
        self.proxy.close(linger=0)
        self.context.term()


@asynccontextmanager
async def a_line(directory: Path, proxy_lost_after_s: float = 60.0) -> AsyncIterator[Situation]:
    made = Situation(directory, proxy_lost_after_s)
    try:
        yield made
    finally:
        await made.end()


async def test_another_proxy_finds_a_worker_that_has_dropped_what_the_first_one_gave_it(tmp_path: Path) -> None:
    async with a_line(tmp_path) as it:
        it.begin()
        await it.join("proxy-1")
        await it.say(wire.ProxyBeat("proxy-2"))
        assert (await it.hear(wire.WorkerHello)).proxies_lost == 0
        await it.say(wire.Welcome("proxy-2"))
        await it.say(wire.ProxyBeat("proxy-3"))
        await it.hear(wire.WorkerHello, proxies_lost=1)
        assert it.host.drops == 1


async def test_a_proxy_that_falls_silent_is_forgotten_and_called_again(tmp_path: Path) -> None:
    async with a_line(tmp_path, proxy_lost_after_s=0.05) as it:
        it.begin()
        await it.join("proxy-1")
        await it.hear(wire.WorkerHello, proxies_lost=1)
        assert (it.host.drops, it.line.proxy_epoch) == (1, "")


async def test_a_frame_that_is_no_message_is_counted_and_the_next_one_obeyed(tmp_path: Path) -> None:
    async with a_line(tmp_path) as it:
        it.begin()
        await it.join("proxy-1")
        await it.say(b"\xc1")
        await it.say(wire.Abort(["a"]))
        await it.say(wire.Drain(wire.LEAVE, 60))
        await it.hear(wire.WorkerHello, drains_to=wire.LEAVE)
        assert it.line.bad_frames == 1
        assert it.host.obeyed == [wire.Abort(["a"])]


@pytest.mark.parametrize(
    ("message", "left"),
    [
        (wire.Rejected("another model"), Left("the proxy refused this worker: another model", 2)),
        (wire.Shutdown(1.0), Left("the proxy shut down", 0)),
    ],
)
async def test_a_proxy_sends_a_worker_away(tmp_path: Path, message: wire.ToWorker, left: Left) -> None:
    async with a_line(tmp_path) as it:
        it.begin()
        await it.hear(wire.WorkerHello)
        await it.say(message)
        assert it.left is not None
        assert await asyncio.wait_for(it.left, 10) == left


async def test_hellos_that_nobody_reads_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = 0

    async def next_beat(_seconds: float) -> None:
        nonlocal beats
        beats += 1
        if beats == 10:
            raise TimeoutError

    monkeypatch.setattr(proxy_line, "MAX_UNSENT", 3)
    async with a_line(tmp_path) as it:
        monkeypatch.setattr(asyncio, "sleep", next_beat)
        with pytest.raises(TimeoutError):
            await it.line._beat()
        monkeypatch.undo()
        assert it.line._outbox.qsize() == 3
