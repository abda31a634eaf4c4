"""The proxy's tcp port for workers: who holds the key joins, nobody else is heard."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from cluster import messages
from cluster.trust import ClusterKey, call_with_key, new_key
from proxy.workers.worker_socket import SocketAddressError, WorkerSocket
from tests.unit.kvtransfer.trust.strangers import OLD_GREETING, Tap, raw, repeat
from tests.unit.proxy.mini_cluster import until

GOODBYE = msgspec.msgpack.encode(messages.Goodbye("decode-0", "epoch", "bye"))


class Proxy:
    """A worker socket on tcp, and what it heard."""

    def __init__(self) -> None:
        self.key = new_key()
        self.heard: list[Any] = []
        self.socket = WorkerSocket("tcp://127.0.0.1:*", self._take, lambda _reason: None, self.key)

    def _take(self, _identity: bytes, message: Any, _frames: Sequence[zmq.Frame]) -> None:
        self.heard.append(message)

    @property
    def num_refused(self) -> int:
        return sum(self.socket.refused.values())


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.socket.close()


@pytest.fixture
async def context() -> "AsyncIterator[zmq.asyncio.Context]":
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def say_goodbye(context: zmq.asyncio.Context, address: str, key: ClusterKey | None) -> zmq.asyncio.Socket:
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.LINGER, 0)
    worker.setsockopt(zmq.RECONNECT_IVL, -1)
    call_with_key(worker, address, key)
    worker.connect(address)
    await worker.send(GOODBYE)
    return worker


async def test_a_worker_with_the_key_is_heard_and_answered(proxy: Proxy, context: zmq.asyncio.Context) -> None:
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.IDENTITY, b"me")
    call_with_key(worker, proxy.socket.address, proxy.key)
    worker.connect(proxy.socket.address)
    await worker.send(GOODBYE)
    await until(lambda: len(proxy.heard) == 1)
    assert proxy.socket.send(b"me", messages.ProxyBeat("e"))
    assert await asyncio.wait_for(worker.recv(), 20) == msgspec.msgpack.encode(messages.ProxyBeat("e"))
    assert proxy.num_refused == 0
    worker.close()


@pytest.mark.parametrize("own_key", [False, True], ids=["no key", "wrong key"])
async def test_a_stranger_is_counted_and_not_heard(proxy: Proxy, context: zmq.asyncio.Context, own_key: bool) -> None:
    stranger = await say_goodbye(context, proxy.socket.address, new_key() if own_key else None)
    await until(lambda: proxy.num_refused == 1)
    friend = await say_goodbye(context, proxy.socket.address, proxy.key)
    await until(lambda: len(proxy.heard) == 1)
    assert proxy.num_refused == 1
    stranger.close()
    friend.close()


async def test_an_old_protocol_is_counted_and_not_heard(proxy: Proxy) -> None:
    with raw(proxy.socket.address, OLD_GREETING):
        await until(lambda: proxy.num_refused == 1)
    assert proxy.heard == []


async def test_a_replayed_hello_is_counted_and_not_heard(proxy: Proxy, context: zmq.asyncio.Context) -> None:
    tap = await asyncio.to_thread(Tap, proxy.socket.address)
    worker = await say_goodbye(context, tap.address, proxy.key)
    await until(lambda: len(proxy.heard) == 1)
    worker.close()
    await asyncio.to_thread(tap.close)
    with await asyncio.to_thread(repeat, proxy.socket.address, bytes(tap.said)):
        await until(lambda: proxy.num_refused == 1)
    assert len(proxy.heard) == 1


async def test_no_port_is_opened_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(SocketAddressError, match="without a key"):
        WorkerSocket("tcp://127.0.0.1:*", lambda *_: None, lambda _: None)
