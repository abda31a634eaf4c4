"""The sockets of one rank, as the endpoint's thread opens, reads and closes them."""

import os
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtransfer.endpoint.frames import MAX_CONTROL_BYTES
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.trust.door import Door, call_with_key, is_loopback, is_network
from kvtransfer.trust.key import ClusterKey

_MESSAGES_PER_TURN = 64
"""Per socket, so that a busy one does not starve the others."""


_LOOPBACK_BUFFER_BYTES = 256 << 10


class Wakeup:
    """Lets any thread end the endpoint thread's wait. Wakes that come together count once."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Once nothing waits for it; setting it does nothing from then on."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, settings: EndpointSettings, address: str
) -> zmq.Socket[bytes]:
    """A socket for that address, neither bound nor connected yet. It never lingers, notices dead peers and refuses
    frames that nobody should send.

    ZMQ cuts a connection that sends more than MAXMSGSIZE; frames between the protocol's own limits and that are
    dropped one by one and counted.
    """
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0  # what is under way is bounded by credits and by the number of transfers
    socket.set(zmq.HEARTBEAT_IVL, int(settings.peer_heartbeat_s * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(settings.peer_lost_after_s * 1000))
    if is_loopback(address):
        # What waits between two processes of one machine should still lie in the processor's cache when it is read; on
        # a network the kernel knows better how much must be under way.
        socket.set(zmq.SNDBUF, _LOOPBACK_BUFFER_BYTES)
        socket.set(zmq.RCVBUF, _LOOPBACK_BUFFER_BYTES)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def bind_exporter(
    context: zmq.Context[zmq.Socket[bytes]], settings: EndpointSettings, key: ClusterKey | None
) -> tuple[zmq.Socket[bytes], str, Door]:
    """The ROUTER that importers connect to, its address, and its door. Raises OSError naming the address."""
    socket = open_socket(context, zmq.ROUTER, settings, settings.bind)
    socket.set(zmq.MAXMSGSIZE, 2 * MAX_CONTROL_BYTES)
    door = Door(context, socket, key if is_network(settings.bind) else None)
    bind = f"{settings.bind}-{settings.rank}" if settings.bind.startswith("ipc://") else settings.bind
    try:
        socket.bind(bind)
    except zmq.ZMQError as error:
        door.close()
        socket.close()
        raise OSError(
            error.errno,
            f"rank {settings.rank} cannot bind its exporter to {bind}: {error.strerror}. "
            "Choose a free port or a directory that exists and is writable.",
        ) from error
    return socket, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), door


class PeerSocket:
    """The DEALER to one exporter, and the monitor that tells when its connection is gone. Raises zmq.ZMQError."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        settings: EndpointSettings,
        max_bytes: int,
        key: ClusterKey | None,
    ) -> None:
        self.socket = open_socket(context, zmq.DEALER, settings, address)
        self.socket.set(zmq.MAXMSGSIZE, 2 * max(max_bytes, MAX_CONTROL_BYTES))
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        call_with_key(self.socket, address, key)
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close(linger_ms=0)
            raise

    def was_disconnected(self) -> bool:
        disconnected = False
        while self.monitor.poll(0):
            disconnected |= recv_monitor_message(self.monitor)["event"] == zmq.EVENT_DISCONNECTED
        return disconnected

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger_ms)


def waiting_messages(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What has arrived, up to a fair share of this turn."""
    for _ in range(_MESSAGES_PER_TURN):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
