"""Those who should not get in, and the wire between two who may."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq

from kvtransfer.trust.door import call_with_key
from kvtransfer.trust.key import ClusterKey

SAID = b"good morning, server"
"""Too long to be found in what is encrypted by chance."""
OLD_GREETING = b"\x01\x00\x01\x00\x02hi"
"""A whole conversation of ZMTP 1.0, which knows no encryption: an anonymous identity and one message."""


def caller(context: "zmq.Context[Any]", address: str, key: ClusterKey | None, said: bytes = SAID) -> "zmq.Socket[Any]":
    """A DEALER that has said something, and does not come back when it is turned away."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    call_with_key(dealer, address, key)
    dealer.connect(address)
    _say(dealer, said)
    return dealer


def caller_with(context: "zmq.Context[Any]", address: str, own: ClusterKey, server: ClusterKey) -> "zmq.Socket[Any]":
    """The same with a key of its own, and the server's public key, or what it takes for that."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    call_with_key(dealer, address, own)
    dealer.curve_serverkey = server.public.encode()
    dealer.connect(address)
    _say(dealer, SAID)
    return dealer


def _say(dealer: "zmq.Socket[Any]", said: bytes) -> None:
    with suppress(zmq.Again):  # turned away already: a `send` that waits would wait for ever
        dealer.send(said, zmq.NOBLOCK)


def raw(address: str, said: bytes) -> socket.socket:
    """A plain TCP connection on which this was said."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(said)
    return connection


class Tap:
    """Between a client and a server: hands everything on, and keeps what the client said."""

    def __init__(self, address: str) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._server = raw(address, b"")
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.said = bytearray()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        back = threading.Thread(target=_hand_on, args=(self._server, client, bytearray()), daemon=True)
        self._threads.append(back)
        back.start()
        _hand_on(client, self._server, self.said)

    def close(self) -> None:
        """After both ends are closed."""
        self._listening.close()
        for thread in list(self._threads):
            thread.join(20)


def _hand_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    try:
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the other thread
            end.close()


def repeat(address: str, said: bytes) -> socket.socket:
    """Says once more what a client said, each part when the server has answered the one before."""
    greeting, hello_end = 64, 64 + 2 + said[65]
    connection = raw(address, said[:greeting])
    _receive(connection, greeting)
    connection.sendall(said[greeting:hello_end])
    assert b"WELCOME" in _receive(connection, 32)
    connection.sendall(said[hello_end:])
    return connection


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        data = connection.recv(num_bytes - len(received))
        assert data, "the server has closed the connection"
        received += data
    return bytes(received)


@contextmanager
def zmq_context() -> Iterator["zmq.Context[Any]"]:
    """Closed with all its sockets."""
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)
