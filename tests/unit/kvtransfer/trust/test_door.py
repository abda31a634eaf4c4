"""Who gets through the door of a listening socket, and who is counted instead."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from kvtransfer.trust import door as door_module
from kvtransfer.trust.door import Door, is_loopback, is_network
from kvtransfer.trust.key import ClusterKey, new_key
from tests.unit.kvtransfer.trust.strangers import (
    OLD_GREETING,
    SAID,
    Tap,
    caller,
    caller_with,
    raw,
    repeat,
    zmq_context,
)

Stranger = Callable[["zmq.Context[Any]", str, ClusterKey], Any]


class Server:
    """A ROUTER behind a door, and what it heard."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self.key = new_key()
        self.router = context.socket(zmq.ROUTER)
        self.door = Door(context, self.router, self.key)
        self.router.bind("tcp://127.0.0.1:*")
        self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.heard: list[bytes] = []
        self._poller = zmq.Poller()
        for socket in (self.router, *self.door.sockets):
            self._poller.register(socket, zmq.POLLIN)

    def until(self, happened: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline_s, f"heard {self.heard}, refused {dict(self.door.refused)}"
            if self.router in dict(self._poller.poll(200)):
                self.heard.append(self.router.recv_multipart()[1])
            self.door.attend()


@pytest.fixture
def context() -> "Iterator[zmq.Context[Any]]":
    with zmq_context() as context:
        yield context


@pytest.fixture
def server(context: "zmq.Context[Any]", monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(door_module, "HANDSHAKE_MS", 300)
    with zmq_context() as own:
        server = Server(own)
        yield server
        server.door.close()
        server.router.close()


STRANGERS: dict[str, Stranger] = {
    "without encryption": lambda context, address, _: caller(context, address, None),
    "with a key of its own": lambda context, address, _: caller(context, address, new_key()),
    "who takes the server for another": lambda context, address, key: caller_with(context, address, key, new_key()),
    "who says nothing": lambda _context, address, _key: raw(address, b""),
    "who speaks HTTP": lambda _context, address, _key: raw(address, b"GET / HTTP/1.1\r\n\r\n"),
    "of a protocol before encryption": lambda _context, address, _key: raw(address, OLD_GREETING),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_counted_and_not_heard(server: Server, context: "zmq.Context[Any]", who: str) -> None:
    connection = STRANGERS[who](context, server.address, server.key)
    # Whoever notices first that the two do not fit ends the connection, which decides the reason.
    server.until(lambda: server.door.refused.total() == 1)
    assert set(server.door.refused) <= {"no_valid_handshake", "left_or_silent"}
    with caller(context, server.address, server.key):
        server.until(lambda: bool(server.heard))
    assert server.heard == [SAID]
    assert server.door.refused.total() == 1
    connection.close()


def test_knowing_the_public_key_is_not_enough(server: Server, context: "zmq.Context[Any]") -> None:
    connection = caller_with(context, server.address, new_key(), server.key)
    server.until(lambda: server.door.refused["unknown_key"] == 1)
    assert not server.heard
    connection.close()


def test_a_conversation_that_is_repeated_byte_for_byte_gets_nothing(
    server: Server, context: "zmq.Context[Any]"
) -> None:
    tap = Tap(server.address)
    friend = caller(context, tap.address, server.key)
    server.until(lambda: server.heard == [SAID])
    friend.close()
    tap.close()
    assert b"CURVE" in tap.said
    assert SAID not in tap.said
    before = server.door.refused.total()
    with ThreadPoolExecutor() as threads:
        repeating = threads.submit(repeat, server.address, bytes(tap.said))
        server.until(repeating.done)
    repeated = repeating.result()
    server.until(lambda: server.door.refused.total() == before + 1)
    while repeated.recv(1000):  # until the server has closed it
        pass
    assert server.heard == [SAID]
    repeated.close()


def test_nobody_gets_in_before_the_door_is_attended(server: Server, context: "zmq.Context[Any]") -> None:
    with caller(context, server.address, server.key):
        assert not server.router.poll(200)
        server.until(lambda: server.heard == [SAID])


def test_however_many_come_while_nobody_attends_zmqs_thread_does_not_wait(server: Server) -> None:
    # A full monitor would stop all traffic of the context, and `close` for ever; some 700 connections fill one.
    assert server.door.sockets[1].rcvhwm == 0


def test_a_door_without_a_key_stands_open() -> None:
    with zmq_context() as context, context.socket(zmq.ROUTER) as router:
        door = Door(context, router, None)
        router.bind("tcp://127.0.0.1:*")
        with caller(context, router.getsockopt_string(zmq.LAST_ENDPOINT), None):
            assert router.recv_multipart()[1] == SAID
        assert door.sockets == ()
        door.attend()
        door.close()


@pytest.mark.parametrize(
    ("address", "network", "loopback"),
    [
        ("ipc:///run/x", False, False),
        ("tcp://127.0.0.1:0", True, True),
        ("tcp://[::1]:5", True, True),
        ("tcp://localhost:1", True, True),
        ("tcp://10.0.0.1:0", True, False),
        ("tcp://*:0", True, False),
    ],
)
def test_it_is_known_who_can_reach_an_address(address: str, network: bool, loopback: bool) -> None:
    assert is_network(address) == network
    assert is_loopback(address) == loopback
