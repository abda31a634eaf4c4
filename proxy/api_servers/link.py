"""A further API server process's socket to the dispatcher: a DEALER, owned by one task.

When the dispatcher is silent, its process is gone or stands still, and workers drop its requests. There is nothing to
wait for then: the link's watch ends with `DispatcherLost`, and the process with it.
"""

import asyncio
import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from cluster.frames import BadFrame, reader
from proxy.adapters.adapter import Adapter
from proxy.api_servers import messages
from proxy.api_servers.control import ANSWER_WITHIN_S
from proxy.peer_socket import MAX_FRAME_BYTES
from proxy.supervision import beats

log = logging.getLogger("twinpool.api_server")

_REPLY_GRACE_S = 5.0
"""The dispatcher keeps deadlines of its own and says which was missed."""


class DispatcherLost(Exception):
    """The process that has the workers is gone, or does not answer."""


class DispatcherLink:
    """Made and used on one event loop.

    `on_outputs(frames)` and `on_failed(request_id, status, message, retry_after_s)` get what concerns requests, and
    must be set before the first request; `on_adapters(adapters)` what may be asked for; `on_leave` is called when
    this process is told to end.
    """

    def __init__(
        self,
        address: str,
        name: str,
        heartbeat_s: float,
        lost_after_s: float,
        on_leave: Callable[[messages.Leave], None],
    ) -> None:
        self.on_outputs: Callable[[Sequence[zmq.Frame]], None] = _nobody_asked
        self.on_failed: Callable[[str, int, str, float | None], None] = _nobody_asked
        self.on_adapters: Callable[[Sequence[Adapter]], None] = _nobody_asked
        self.bad_frames = 0
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._on_leave = on_leave
        self._welcome: asyncio.Future[messages.Welcome] = asyncio.get_running_loop().create_future()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._read_frame = reader(msgspec.msgpack.Decoder[messages.ToApiServer](messages.ToApiServer))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.IDENTITY, f"{name}.{uuid.uuid4().hex}".encode())
        self._socket.connect(address)
        self.adapters: Sequence[Adapter] = ()
        """What clients may ask for, as far as it was told."""
        self._heard_s = time.monotonic()
        self.tasks = (
            asyncio.create_task(self._read(), name="link to the dispatcher"),
            asyncio.create_task(self._beat(), name="beats of the dispatcher"),
        )
        """The tasks that must not end while this process serves."""

    async def welcome(self, timeout_s: float) -> messages.Welcome:
        """What the dispatcher says when the workers are up; raises `DispatcherLost`."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._welcome), timeout_s)
        except TimeoutError as error:
            raise DispatcherLost(
                f"the workers were not up within {timeout_s:g} s (start_timeout_s); see the log of twinpool serve"
            ) from error

    def send(self, message: messages.FromApiServer, frames: Sequence[Any] = ()) -> None:
        """Queues a message; the dispatcher's silence tells if it does not arrive."""
        body = [self._encoder.encode(message), *frames]
        sent = cast("asyncio.Future[object]", self._socket.send_multipart(body, flags=zmq.NOBLOCK, copy=True))
        if sent.done() and sent.exception() is not None:
            log.debug("send_failed message=%s error=%s", type(message).__name__, sent.exception())

    async def call(self, method: str, args: Sequence[Any], timeout_s: float) -> messages.CallReply | None:
        """An engine call on every worker; None if no reply came in time."""
        packed = msgspec.Raw(msgspec.msgpack.encode(args))
        reply = await self._ask(lambda call_id: messages.Call(call_id, method, packed), timeout_s + _REPLY_GRACE_S)
        return cast("messages.CallReply | None", reply)

    async def load_adapter(self, adapter: Adapter, again: bool, timeout_s: float) -> messages.AdapterLoaded | None:
        """Has an adapter loaded into every worker; None if no reply came in time."""
        wanted = lambda call_id: messages.LoadAdapter(call_id, adapter, again)  # noqa: E731
        return cast("messages.AdapterLoaded | None", await self._ask(wanted, timeout_s + _REPLY_GRACE_S))

    async def control(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> messages.ControlReply | None:
        """An HTTP request for the process that has the workers; None if no reply came in time."""
        timeout_s = ANSWER_WITHIN_S + _REPLY_GRACE_S
        reply = await self._ask(lambda call_id: messages.Control(call_id, method, target, headers, body), timeout_s)
        return cast("messages.ControlReply | None", reply)

    async def _ask(self, message: Callable[[int], messages.FromApiServer], timeout_s: float) -> Any:
        call_id = next(self._call_ids)
        self._replies[call_id] = reply = asyncio.get_running_loop().create_future()
        try:
            self.send(message(call_id))
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._replies[call_id]

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self._heard_s = time.monotonic()
            try:
                message = self._read_frame(frames[0].buffer)
            except BadFrame as error:
                self.bad_frames += 1
                log.warning("bad_dispatcher_frame error=%s", error)
                continue
            self._take(message, frames[1:])

    def _take(self, message: messages.ToApiServer, frames: Sequence[zmq.Frame]) -> None:
        match message:
            case messages.Outputs():
                self.on_outputs(frames)
            case messages.Failed(request_id, status, text, retry_after_s):
                self.on_failed(request_id, status, text, retry_after_s)
            case messages.CallReply() | messages.ControlReply() | messages.AdapterLoaded():
                reply = self._replies.get(message.call_id)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case messages.Adapters(version, adapters):
                self.adapters = adapters
                self.on_adapters(adapters)
                self.send(messages.AdaptersKnown(version))
            case messages.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case messages.Leave():
                log.info("told_to_leave cause=%s", message.cause)
                self._on_leave(message)
            case messages.Beat():
                pass

    async def _beat(self) -> None:
        async for now_s, late_s in beats(self._heartbeat_s):
            if not self._welcome.done():
                self.send(messages.Hello(self._name, os.getpid()))
                continue
            self.send(messages.Beat())
            self._heard_s += late_s
            if now_s - self._heard_s > self._lost_after_s:
                self._give_up_waiting()
                raise DispatcherLost(f"nothing was heard of the dispatcher for {now_s - self._heard_s:.1f} s")

    def _give_up_waiting(self) -> None:
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(None)

    def close(self) -> None:
        """Stops at once."""
        for task in self.tasks:
            task.cancel()
        self._socket.close()
        self._context.term()


def _nobody_asked(*_args: Any) -> None:
    """Stands for a front end that does not exist yet: no request of its can be on its way."""
