"""Lets only holders of the cluster's key connect to a socket, and counts whom it turned away.

ZMQ's own threads do the handshakes. For each client key they ask the answerer of the context (ZAP), which is in here,
and tell failures to a monitor, which is in here too. Whoever owns the listening socket polls `sockets` and calls
`attend`; nothing here waits.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import zmq
from zmq.auth.base import Authenticator
from zmq.utils.monitor import parse_monitor_message

from kvtransfer.trust.handshakes import EVENTS, Handshakes
from kvtransfer.trust.key import ClusterKey

log = logging.getLogger("twinpool.trust")

DOMAIN = "twinpool"
HANDSHAKE_MS = 5_000
"""A connection that has not shown the key by then is closed."""
_LOG_EVERY_S = 10.0
_PER_TURN = 64

_numbers = itertools.count()


def is_network(address: str) -> bool:
    """Whether others than this user's processes on this machine can reach a ZMQ address."""
    return not address.startswith(("ipc://", "inproc://"))


def is_loopback(address: str) -> bool:
    """Whether a ZMQ address is of this machine alone."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def call_with_key(socket: "zmq.Socket[Any]", address: str, key: ClusterKey | None) -> None:
    """Before `connect`: proves to whoever listens at `address` that we hold the key, and wants the same proof.

    Over ipc neither is needed.
    """
    if key is not None and is_network(address):
        socket.set(zmq.CURVE_PUBLICKEY, key.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, key.secret.encode())
        socket.set(zmq.CURVE_SERVERKEY, key.public.encode())


class Door:
    """Of one listening socket. Made before that is bound, in a context that has no other door."""

    def __init__(self, context: "zmq.Context[Any]", listening: "zmq.Socket[Any]", key: ClusterKey | None) -> None:
        """Without a key it stands open: `sockets` is empty."""
        self._handshakes = Handshakes(limit_s=2 * HANDSHAKE_MS / 1000)
        self.sockets: tuple[zmq.Socket[bytes], ...] = ()
        self._told_s = -_LOG_EVERY_S
        self._told = 0
        if key is None:
            return
        listening.set(zmq.CURVE_SERVER, 1)
        listening.set(zmq.CURVE_SECRETKEY, key.secret.encode())
        listening.set_string(zmq.ZAP_DOMAIN, DOMAIN)
        listening.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in while nobody answers
        listening.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # A context has one answerer for all its sockets; its own socket is a plain one also in an asyncio context.
        self._authenticator = Authenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, _KnowsOne(key.public.encode()))
        answerer: zmq.Socket[bytes] = self._authenticator.zap_socket
        address = f"inproc://door-{next(_numbers)}"
        listening.monitor(address, EVENTS)
        self._monitor = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._monitor.linger = 0
        # If events could fill it, ZMQ's thread would wait for `attend`, and so would the traffic of all peers; `close`
        # would wait for that thread for ever.
        self._monitor.rcvhwm = 0
        self._monitor.connect(address)
        self._listening = listening
        self.sockets = (answerer, self._monitor)

    def attend(self) -> None:
        """Answers for the keys that were shown, and counts who was refused; as many as fit into one turn."""
        if not self.sockets:
            return
        answerer, monitor = self.sockets
        for _ in range(_PER_TURN):
            if not answerer.poll(0):
                break
            _run(self._authenticator.handle_zap_message(answerer.recv_multipart()))
        now_s = time.monotonic()
        for _ in range(_PER_TURN):
            if not monitor.poll(0):
                break
            event = parse_monitor_message(monitor.recv_multipart())
            self._handshakes.take(int(event["event"]), int(event["value"]), now_s)
        if self.refused.total() > self._told and now_s - self._told_s >= _LOG_EVERY_S:
            log.warning("connections_refused so_far=%s", dict(self.refused))
            self._told_s, self._told = now_s, self.refused.total()

    @property
    def refused(self) -> Counter[str]:
        """Connections that were turned away, by reason."""
        return self._handshakes.refused

    def close(self) -> None:
        """Before the listening socket is closed."""
        if not self.sockets:
            return
        self.sockets = ()
        self._listening.monitor(None, 0)  # switches it off
        self._monitor.close(linger=0)
        self._authenticator.stop()


class _KnowsOne:
    """What pyzmq asks about a client's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, _domain: str, public: bytes) -> bool:
        return public == self._public


def _run(answer: Coroutine[Any, Any, None]) -> None:
    """pyzmq's method waits for nothing with a callback that does not."""
    try:
        answer.send(None)
    except StopIteration:
        return
    answer.close()
    raise RuntimeError("pyzmq's Authenticator.handle_zap_message waits; this version of it is not supported")
