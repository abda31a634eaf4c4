"""A worker host on real sockets, with a proxy of the test's own and an engine that does what it is told."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from cluster import messages as wire
from cluster.config import LivenessConfig, TransferConfig
from cluster.host import drain, proxy_line, worker_host
from cluster.host.vllm_engine import EngineLost
from cluster.host.worker_host import WorkerHost
from cluster.worker_settings import WorkerSettings
from kvtransfer import host_messages

FACTS = wire.EngineFacts("m", 2048, 16, 100, 8, 512, 1, "bfloat16", ["generate"])


class FakeEngine:
    """Requests are their ids; one ends when the test calls `finish`."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.stopped = False
        self.adapter_is_read = asyncio.Event()
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineLost] = asyncio.Queue()

    def read_request(self, frames: list[bytes]) -> str:
        return frames[0].decode()

    async def submit(self, request: str) -> None:
        self.submitted.append(request)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call_utility(self, _method: str, _args: Any) -> bool:
        await self.adapter_is_read.wait()
        return True

    async def next_outputs(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if isinstance(outputs, EngineLost):
            raise outputs
        return outputs

    def outputs_frames(self, outputs: EngineCoreOutputs) -> list[bytes]:
        return [",".join(output.request_id for output in outputs.outputs).encode()]

    async def stop(self, _timeout_s: float) -> None:
        self.stopped = True

    def die(self) -> None:
        self._outputs.put_nowait(EngineLost("the engine core died"))

    def finish(self, request_id: str) -> None:
        output = EngineCoreOutput(request_id, [5], finish_reason=FinishReason.LENGTH)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))


class Situation:
    """A host that has joined, its engine, its rank and its proxy."""

    def __init__(self, directory: Path, drain_timeout_s: float) -> None:
        self.engine = FakeEngine()
        self.settings = WorkerSettings(
            worker_id="prefill-1",
            role="prefill",
            proxy_address=f"ipc://{directory}/proxy",
            runtime_dir=directory,
            model="m",
            engine={},
            transfer=TransferConfig(),
            liveness=LivenessConfig(heartbeat_s=0.05),
            start_timeout_s=5,
            stop_timeout_s=1,
            drain_timeout_s=drain_timeout_s,
        )
        self._context = zmq.asyncio.Context()
        self.rank = self._context.socket(zmq.DEALER)
        self.proxy = self._context.socket(zmq.ROUTER)
        self.proxy.bind(self.settings.proxy_address)
        self._decoder = msgspec.msgpack.Decoder[wire.FromWorker](wire.FromWorker)
        self._identity = b""

    async def begin(self) -> None:
        self.task = asyncio.create_task(WorkerHost.start_and_run(self.settings))
        self.rank.connect(self.settings.report_address)
        ready = host_messages.RankReady(0, "ipc://rank", "e", "f", {}, 100, 1, 1)
        await self.rank.send(msgspec.msgpack.encode(ready))
        await self.hear(wire.WorkerHello)
        await self.say(wire.Welcome("proxy-1"))
        await self.hear(wire.WorkerLoad)  # only a host that has read its welcome reports

    async def say(self, message: wire.ToWorker, *frames: bytes) -> None:
        await self.proxy.send_multipart([self._identity, msgspec.msgpack.encode(message), *frames])

    async def hear(self, kind: type, **fields: Any) -> Any:
        """The next message of this kind with these fields."""
        async with asyncio.timeout(3):
            while True:
                self._identity, body, *_ = await self.proxy.recv_multipart()
                message = self._decoder.decode(body)
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    return message

    async def submit(self, request_id: str) -> None:
        await self.say(wire.Submit(request_id), request_id.encode())
        while request_id not in self.engine.submitted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def count(self, exports_open: int) -> None:
        """The rank reports its transfers."""
        stats = host_messages.RankStats(0, exports_open, 0, {}, {}, {}, 0, {})
        await self.rank.send(msgspec.msgpack.encode(stats))

    async def dropped_exports(self) -> list[str]:
        """What the host tells its rank that nobody will fetch."""
        async with asyncio.timeout(10):
            while True:
                message = msgspec.msgpack.decode(await self.rank.recv(), type=host_messages.ToRank)
                if isinstance(message, host_messages.DropExports):
                    return message.transfer_ids

    async def end(self) -> None:
        if not self.task.done():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(self.task, 3)
        self.rank.close(linger=0)
        self.proxy.close(linger=0)
        self._context.term()


@asynccontextmanager
async def joined(
    directory: Path, monkeypatch: pytest.MonkeyPatch, drain_timeout_s: float = 60
) -> AsyncIterator[Situation]:
    made = Situation(directory, drain_timeout_s)

    async def start(_config: Any) -> FakeEngine:
        return made.engine

    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    monkeypatch.setattr(worker_host, "engine_config", lambda *_: config)
    monkeypatch.setattr(worker_host.Engine, "start", start)
    monkeypatch.setattr(drain, "SETTLE_S", 0.0)
    try:
        await made.begin()
        yield made
    finally:
        await made.end()


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_sigterm_lets_an_idle_worker_leave_when_the_proxy_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        sigterm()
        hello = await it.hear(wire.WorkerHello, drains_to=wire.LEAVE)
        assert not it.task.done()
        await it.say(wire.NothingMore(hello.drain))
        goodbye = await it.hear(wire.Goodbye)
        assert goodbye.reason == "drained"
        assert await it.task == 0
        assert it.engine.stopped


async def test_requests_that_come_before_the_proxy_knows_and_leases_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        await it.submit("a")
        sigterm()
        hello = await it.hear(wire.WorkerHello, drains_to=wire.LEAVE)
        await it.submit("b")
        await it.count(exports_open=1)
        await it.say(wire.NothingMore(hello.drain))
        it.engine.finish("a")
        it.engine.finish("b")
        await it.hear(wire.WorkerLoad, exports_open=1)
        await asyncio.sleep(0.05)
        assert not it.task.done(), "blocks are still fetched"
        await it.count(exports_open=0)
        await it.hear(wire.Goodbye)
        assert await it.task == 0
        assert it.engine.aborted == []


async def test_after_the_deadline_it_leaves_without_having_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch, drain_timeout_s=0.1) as it:
        await it.submit("a")
        sigterm()
        goodbye = await it.hear(wire.Goodbye)
        assert goodbye.reason == "drained, but had no more time for 1 requests and 0 transfers"
        assert await it.task == 0


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
async def test_a_second_sigterm_or_a_sigint_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[signal.Signals, ...]
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        await it.submit("a")
        for number in signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        assert (await it.hear(wire.Goodbye)).reason == "told to stop"
        assert await it.task == 0


async def test_a_role_is_taken_when_everything_of_the_old_one_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        await it.submit("a")
        await it.say(wire.Drain("decode", 60))
        hello = await it.hear(wire.WorkerHello, drains_to="decode", role="prefill")
        await it.say(wire.NothingMore(hello.drain))
        it.engine.finish("a")
        changed = await it.hear(wire.WorkerHello, drains_to="", role="decode")
        assert changed.epoch == hello.epoch
        assert changed.proxies_lost == hello.proxies_lost
        assert it.engine.aborted == []
        assert not it.engine.stopped


async def test_a_role_that_is_overdue_is_taken_and_the_rest_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        await it.submit("a")
        await it.say(wire.Drain("decode", 0.05))
        changed = await it.hear(wire.WorkerHello, drains_to="", role="decode")
        assert changed.proxies_lost == 1
        assert it.engine.aborted == ["a"]


async def test_who_hears_nothing_of_its_proxy_drops_its_requests_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.0
    monkeypatch.setattr(proxy_line, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    async with joined(tmp_path, monkeypatch) as it:
        await it.submit("a")
        await it.rank.send(msgspec.msgpack.encode(host_messages.ExportStarted("t-1")))
        await it.hear(wire.PrefillStarted)
        assert it.engine.aborted == []

        late_s = 1000.0

        assert await it.dropped_exports() == ["t-1"]
        hello = await it.hear(wire.WorkerHello)
        assert hello.proxies_lost == 1
        assert it.engine.aborted == ["a"], "nobody waits for it any more"
        assert not it.engine.stopped, "another proxy may come"


async def test_an_engine_call_that_takes_long_holds_nothing_else_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        await it.say(wire.Utility(1, "add_lora", msgspec.Raw(msgspec.msgpack.encode([["name", 1]]))))
        await it.submit("a")
        it.engine.adapter_is_read.set()
        assert (await it.hear(wire.UtilityReply)).error == ""


async def test_a_dead_engine_is_the_cause_that_the_host_leaves_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as it:
        it.engine.die()
        assert (await it.hear(wire.Goodbye)).reason == "the engine core died"
        assert await it.task == 1
