"""The one socket to the workers."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from cluster import messages
from cluster.trust import new_key
from proxy.peer_socket import AT_ONCE
from proxy.workers.worker_socket import SocketAddressError, WorkerSocket
from tests.unit.proxy.mini_cluster import until


def ignore(*_args: Any) -> None:
    return None


async def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(SocketAddressError, match=r"cannot listen for workers at ipc:///no/such/dir/proxy"):
        WorkerSocket("ipc:///no/such/dir/proxy", ignore, ignore)


async def test_a_port_of_its_own_choice_is_told() -> None:
    socket = WorkerSocket("tcp://127.0.0.1:*", ignore, ignore, new_key())
    assert not socket.address.endswith("*")
    socket.close()


async def test_sending_to_nobody_is_known_at_once(tmp_path: Path) -> None:
    socket = WorkerSocket(f"ipc://{tmp_path}/proxy", ignore, ignore)
    assert not socket.send(b"nobody", messages.ProxyBeat("e"))
    socket.close()


async def test_messages_go_both_ways_in_order(tmp_path: Path) -> None:
    heard: list[Any] = []
    socket = WorkerSocket(f"ipc://{tmp_path}/proxy", lambda *message: heard.append(message), ignore)
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IDENTITY, b"me")
    dealer.connect(socket.address)
    for number in range(20):
        await dealer.send_multipart([msgspec.msgpack.encode(messages.PrefillStarted(str(number)))])
    await dealer.send_multipart([msgspec.msgpack.encode(messages.Outputs("e")), b"one", b"two"])
    await until(lambda: len(heard) == 21)
    assert [message.transfer_id for _, message, _ in heard[:20]] == [str(n) for n in range(20)]
    assert [frame.bytes for frame in heard[20][2]] == [b"one", b"two"]
    for number in range(20):
        assert socket.send(b"me", messages.FirstToken("t", number))
    replies = [await dealer.recv() for _ in range(20)]
    decoded = [msgspec.msgpack.decode(reply, type=messages.ToWorker) for reply in replies]
    assert [reply.token for reply in decoded if isinstance(reply, messages.FirstToken)] == list(range(20))
    dealer.close()
    socket.close()
    context.term()


async def test_a_message_that_breaks_its_receiver_does_not_end_the_reader_silently(tmp_path: Path) -> None:
    def fail(*_message: Any) -> None:
        raise RuntimeError("a fault in the proxy")

    socket = WorkerSocket(f"ipc://{tmp_path}/proxy", fail, ignore)
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(socket.address)
    await dealer.send_multipart([msgspec.msgpack.encode(messages.PrefillStarted("x"))])
    with pytest.raises(RuntimeError, match="a fault in the proxy"):
        await asyncio.wait_for(asyncio.shield(socket.tasks[0]), 2)
    dealer.close()
    socket.close()
    context.term()


async def test_a_flood_from_one_worker_leaves_other_tasks_their_turns(tmp_path: Path) -> None:
    num_heard, most_in_a_row = 0, 0

    def hear(*_message: Any) -> None:
        nonlocal num_heard
        num_heard += 1

    socket = WorkerSocket(f"ipc://{tmp_path}/proxy", hear, ignore)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(socket.address)
    frame = msgspec.msgpack.encode(messages.PrefillStarted("t"))
    for _ in range(4 * AT_ONCE):
        dealer.send(frame)
    before = 0
    async with asyncio.timeout(30):
        while num_heard < 4 * AT_ONCE:
            await asyncio.sleep(0)
            most_in_a_row, before = max(most_in_a_row, num_heard - before), num_heard
    assert most_in_a_row <= AT_ONCE + 1
    dealer.close()
    socket.close()
    context.term()
