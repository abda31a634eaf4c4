"""A ROUTER socket of the proxy, owned by one task: to its workers, or to its further API server processes.

Frames from peers are decoded here and handed to the owner's callbacks; whatever is malformed is dropped and counted.
Sends never wait: ROUTER_MANDATORY tells at once when a peer is gone, and a peer that is stuck is given up by its
silence, which bounds what can pile up for it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from cluster.frames import BadFrame, reader
from cluster.trust import ClusterKey, Door, attend, is_network

log = logging.getLogger("twinpool.proxy")

Frame = bytes | bytearray | memoryview | zmq.Frame
Received = TypeVar("Received")

ZMTP_HEARTBEAT_MS = 1_000
ZMTP_TIMEOUT_MS = 5_000
MAX_CONTROL_BYTES = 16 << 20
"""Of the frame that says what the others are."""
MAX_FRAME_BYTES = 1 << 30
"""Of an array in an engine's outputs: log probabilities of a long prompt over a whole vocabulary."""
AT_ONCE = 256
"""Messages taken before other tasks get their turn."""


class SocketAddressError(Exception):
    """The address cannot be bound."""


class PeerSocket(Generic[Received]):
    """Sends and receives messages. Made and used on one event loop."""

    def __init__(
        self,
        address: str,
        peers: str,
        decoder: msgspec.msgpack.Decoder[Received],
        with_frames: type[Any],
        on_message: Callable[[bytes, Received, Sequence[zmq.Frame]], None],
        on_bad_frame: Callable[[bytes, str], None],
        key: ClusterKey | None = None,
    ) -> None:
        """Binds; raises `SocketAddressError`.

        Args:
            address: where to listen.
            peers: what they are called, in an error and in the name of the reading task.
            decoder: of the first frame.
            with_frames: the message that further frames may follow.
            on_message: gets the sender's identity, the message, and the frames that follow it.
            on_bad_frame: gets the sender's identity and the reason why something of it was dropped.
            key: what peers must hold; needed where `address` is tcp.
        """
        if is_network(address) and key is None:
            raise SocketAddressError(
                f"the proxy would listen for {peers} at {address} without a key, so that anybody could take their "
                "place; give security.key_file, or leave security.workers_host empty"
            )
        self._on_message = on_message
        self._on_bad_frame = on_bad_frame
        self._with_frames = with_frames
        self._encoder = msgspec.msgpack.Encoder()
        self._read_frame = reader(decoder, MAX_CONTROL_BYTES)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._door = Door(self._context, self._socket, key if is_network(address) else None)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A restarted peer may come back under the routing id it had.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, ZMTP_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._door.close()
            self._socket.close()
            self._context.term()
            raise SocketAddressError(
                f"the proxy cannot listen for {peers} at {address}: {error.strerror}; choose another address"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = [asyncio.create_task(self._read(), name=f"socket of {peers}")]
        if self._door.sockets:
            self._tasks.append(asyncio.create_task(attend(self._door), name=f"door of {peers}"))

    @property
    def tasks(self) -> tuple["asyncio.Task[None]", ...]:
        """They end only through `close` or by a fault, which the owner must notice. The first one receives."""
        return tuple(self._tasks)

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections that were turned away, by reason."""
        return self._door.refused

    def send(self, identity: bytes, message: Any, extra: Sequence[Frame] = ()) -> bool:
        """Queues a message; False if no such peer is connected."""
        frames = [identity, self._encoder.encode(message), *extra]
        # With NOBLOCK pyzmq has tried before it returns the future.
        sent = cast("asyncio.Future[object]", self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True))
        error = sent.exception() if sent.done() else None
        if error is not None:
            log.debug("send_failed message=%s error=%s", type(message).__name__, error)
        return error is None

    async def _read(self) -> None:
        # Waiting costs a future each time: what is there already is taken without. No other coroutine runs in between,
        # so the next wait looks at the socket before it trusts that it will be woken.
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        while True:
            self._take(await self._socket.recv_multipart(copy=False))
            for _ in range(AT_ONCE):
                try:
                    frames = plain.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._take(frames)
            else:
                await asyncio.sleep(0)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) < 2:
            self._on_bad_frame(frames[0].bytes, "too few frames")
            return
        try:
            message = self._read_frame(frames[1].buffer)
        except BadFrame as error:
            self._on_bad_frame(frames[0].bytes, str(error))
            return
        if len(frames) > 2 and not isinstance(message, self._with_frames):
            self._on_bad_frame(frames[0].bytes, f"{type(message).__name__} with unexpected frames")
            return
        self._on_message(frames[0].bytes, message, frames[2:])

    def close(self, linger_ms: int = 0) -> None:
        """Stops at once; messages that are not delivered within `linger_ms` are dropped."""
        for task in self._tasks:
            task.cancel()
        self._door.close()
        self._socket.close(linger=linger_ms)
        self._context.term()
