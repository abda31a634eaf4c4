"""The proxy's one socket to its workers: a ROUTER, owned by one task.

Frames from workers are decoded here and handed to the owner's callbacks; whatever is malformed, from a stranger or
from an earlier life of a worker is dropped and counted. Sends never wait: ROUTER_MANDATORY tells at once when a peer
is gone, and a peer that is stuck is given up by its silence, which bounds what can pile up for it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from cluster import messages
from cluster.frames import BadFrame, reader

log = logging.getLogger("twinpool.proxy")

Frame = bytes | bytearray | memoryview | zmq.Frame

ZMTP_HEARTBEAT_MS = 1_000
ZMTP_TIMEOUT_MS = 5_000
MAX_CONTROL_BYTES = 16 << 20
"""Of a frame from `cluster.messages`."""
MAX_FRAME_BYTES = 1 << 30
"""Of an array in an engine's outputs: log probabilities of a long prompt over a whole vocabulary."""


class SocketAddressError(Exception):
    """The address cannot be bound."""


class WorkerSocket:
    """Sends and receives `cluster.messages`. Made and used on one event loop."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, messages.FromWorker, Sequence[zmq.Frame]], None],
        on_bad_frame: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_bad_frame = on_bad_frame
        self._encoder = msgspec.msgpack.Encoder()
        self._read_frame = reader(msgspec.msgpack.Decoder[messages.FromWorker](messages.FromWorker), MAX_CONTROL_BYTES)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A restarted host may come back under the routing id it had.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, ZMTP_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise SocketAddressError(
                f"the proxy cannot listen for workers at {address}: {error.strerror}; choose another address"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reader = asyncio.create_task(self._read(), name="worker-socket")

    @property
    def reader(self) -> "asyncio.Task[None]":
        """The receiving task; it ends only through `close` or by a fault, which the owner must notice."""
        return self._reader

    def send(self, identity: bytes, message: messages.ToWorker, extra: Sequence[Frame] = ()) -> bool:
        """Queues a message; False if no such peer is connected."""
        frames = [identity, self._encoder.encode(message), *extra]
        # With NOBLOCK pyzmq has tried before it returns the future.
        sent = cast("asyncio.Future[object]", self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True))
        error = sent.exception() if sent.done() else None
        if error is not None:
            log.debug("send_failed message=%s error=%s", type(message).__name__, error)
        return error is None

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self._take(frames)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) < 2:
            self._on_bad_frame("too few frames")
            return
        try:
            message = self._read_frame(frames[1].buffer)
        except BadFrame as error:
            self._on_bad_frame(str(error))
            return
        if len(frames) > 2 and not isinstance(message, messages.Outputs):
            self._on_bad_frame(f"{type(message).__name__} with unexpected frames")
            return
        self._on_message(frames[0].bytes, message, frames[2:])

    def close(self) -> None:
        """Stops at once; undelivered messages are dropped."""
        self._reader.cancel()
        self._socket.close(linger=0)
        self._context.term()
