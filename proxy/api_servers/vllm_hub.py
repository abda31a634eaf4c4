"""The dispatcher's side of the further API server processes.

One ROUTER socket with one owner. A process that says hello becomes a front end of the dispatcher; when it ends, or is
silent for long, its requests are aborted on the workers at once and everybody else's go on.

Relies on vLLM 0.32: `MsgpackEncoder`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq
from vllm.v1.serial_utils import MsgpackEncoder

from cluster.config import LivenessConfig
from cluster.messages import EngineFacts
from cluster.status import ApiServerStatus, LaunchNote
from proxy.adapters.adapter import Adapter
from proxy.api_servers import messages
from proxy.api_servers.accept_loads import NOT_ACCEPTING
from proxy.api_servers.control import ControlDesk, error_reply
from proxy.api_servers.vllm_remote_front_end import BadRequest, RemoteFrontEnd, RequestDecoder
from proxy.dispatch.dispatcher import Dispatcher
from proxy.legs.vllm_leg_requests import ClientTransferParams, describe
from proxy.metrics import ProxyMetrics
from proxy.peer_socket import PeerSocket
from proxy.supervision import beats, log_failure
from proxy.workers.engine_calls import UtilityError
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")

SILENCE_FACTOR = 3
"""A process that tokenizes something huge is silent for a while; that it has ended, the launcher tells at once."""
LAST_WORDS_MS = 500
ADAPTERS_KNOWN_WITHIN_S = 5.0
"""A process that does not say so is stuck, or gone; it hears of them first when it goes on."""


@dataclass(frozen=True, slots=True)
class _Open:
    """What there is once the workers are up."""

    dispatcher: Dispatcher
    pool: WorkerPool
    welcome: tuple[EngineFacts, int]


class ApiServerHub:
    """Owns the socket. Made and used on one event loop; nothing in it waits for a process."""

    def __init__(
        self,
        address: str,
        names: Sequence[str],
        loads: memoryview,
        liveness: LivenessConfig,
        metrics: ProxyMetrics,
        on_ready: Callable[[str], None] = lambda _name: None,
        returns_routed_experts: bool = False,
    ) -> None:
        """Binds; raises `SocketAddressError`.

        Args:
            address: ZMQ endpoint for the processes.
            names: who may come.
            loads: `accept_loads`, where the process at index i of `names` has index i + 1.
            liveness: how often beats are sent.
            metrics: losses and bad frames are counted there.
            on_ready: called with the name of a process when it accepts connections.
            returns_routed_experts: what the engines do, for `describe`.
        """
        self.names = tuple(names)
        self._loads = loads
        self._liveness = liveness
        self._metrics = metrics
        self._on_ready = on_ready
        self._returns_routed_experts = returns_routed_experts
        self._open: _Open | None = None
        self._front_ends: dict[bytes, RemoteFrontEnd] = {}
        self._desk: ControlDesk | None = None
        self._numbers = itertools.count()
        self._adapters = messages.Adapters(0, [])
        self._adapters_known = asyncio.Event()
        self._changed = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()
        self._encoder = MsgpackEncoder()
        self._decoder = RequestDecoder()
        decoder = msgspec.msgpack.Decoder[messages.FromApiServer](messages.FromApiServer)
        self._socket = PeerSocket(address, "API servers", decoder, messages.Add, self._take, self._bad_frame)
        self._beats = asyncio.create_task(self._beat_for_ever(), name="api-server-beats")

    @property
    def tasks(self) -> tuple["asyncio.Task[None]", ...]:
        """The tasks that must not end while the proxy serves."""
        return (*self._socket.tasks, self._beats)

    def open(
        self, dispatcher: Dispatcher, pool: WorkerPool, facts: EngineFacts, num_engines: int, stop: asyncio.Event
    ) -> None:
        """From now on, processes that say hello are welcome, until `stop`."""
        self._open = _Open(dispatcher, pool, (facts, num_engines))
        pool.adapters.announce_to(self._tell_adapters)
        self._spawn(self._leave_after(stop), "end of the API servers")

    def answer_with(self, app: Any) -> None:
        """Names the ASGI application that answers control requests."""
        self._desk = ControlDesk(app)

    async def until_ready(self, timeout_s: float) -> tuple[str, ...]:
        """Returns when every process accepts connections, or after `timeout_s`: the names of those that do not."""
        deadline_s = time.monotonic() + timeout_s
        while missing := tuple(name for name in self.names if not self._is_ready(name)):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline_s - time.monotonic()))
            except TimeoutError:
                return missing
        return ()

    def _is_ready(self, name: str) -> bool:
        return any(front_end.name == name and front_end.ready for front_end in self._front_ends.values())

    def statuses(self, notes: Mapping[str, LaunchNote]) -> list[ApiServerStatus]:
        """All processes that should be there; `notes` are the launcher's."""
        known = {front_end.name: front_end for front_end in self._front_ends.values()}
        requests: dict[int, int] = {}
        for trip in self._open.dispatcher.trips.values() if self._open is not None else ():
            requests[id(trip.front_end)] = requests.get(id(trip.front_end), 0) + 1
        statuses = []
        for name in self.names:
            front_end, note = known.get(name), notes.get(name)
            state = "dead" if note is not None and not note.starting else "starting"
            pid, text = 0, note.text if note is not None else ""
            if front_end is not None:
                state, pid, text = "ready" if front_end.ready else "starting", front_end.pid, ""
            statuses.append(ApiServerStatus(name, state, pid, requests.get(id(front_end), 0), text))
        return statuses

    # ---------------------------------------------------------------------------------------------- coming, going

    def _hello(self, identity: bytes, hello: messages.Hello) -> None:
        if self._open is None:
            return  # it says hello again
        if hello.name not in self.names:
            self._socket.send(identity, messages.Leave(f"no API server {hello.name} is expected"))
            return
        front_end = self._front_ends.get(identity)
        if front_end is None:
            for former in [f for f in self._front_ends.values() if f.name == hello.name]:
                self._lose(former, "another process came in its place")
            prefix = f"{hello.name}.{next(self._numbers)}/"
            now_s = time.monotonic()
            front_end = RemoteFrontEnd(hello.name, hello.pid, identity, prefix, now_s, self._encoder, self._send)
            self._front_ends[identity] = front_end
            log.info("api_server_joined name=%s pid=%d", hello.name, hello.pid)
        self._send(front_end, messages.Welcome(front_end.prefix, *self._open.welcome))
        self._send(front_end, self._adapters)

    def gone(self, name: str, cause: str) -> None:
        """The process has ended."""
        self._loads[1 + self.names.index(name)] = NOT_ACCEPTING
        for front_end in [f for f in self._front_ends.values() if f.name == name]:
            self._lose(front_end, cause)

    def _lose(self, front_end: RemoteFrontEnd, cause: str) -> None:
        if self._front_ends.pop(front_end.identity, None) is None:
            return
        log.warning("api_server_lost name=%s pid=%d cause=%s", front_end.name, front_end.pid, cause)
        self._metrics.api_server_losses.inc()
        if self._open is not None:
            trips = self._open.dispatcher.trips.values()
            self._open.dispatcher.abort([trip.request_id for trip in trips if trip.front_end is front_end])
        self._socket.send(front_end.identity, messages.Leave(cause))

    async def _leave_after(self, stop: asyncio.Event) -> None:
        await stop.wait()
        if self._open is not None:
            self._open.dispatcher.fail_all(503, "The server is shutting down")
        for front_end in self._front_ends.values():
            self._socket.send(front_end.identity, messages.Leave("the cluster is shutting down", for_good=True))

    async def _beat_for_ever(self) -> None:
        async for now_s, late_s in beats(self._liveness.heartbeat_s):
            for front_end in list(self._front_ends.values()):
                front_end.heard_s += late_s
                self._send(front_end, messages.Beat())
                silent_s = now_s - front_end.heard_s
                # Before it is ready it builds its server, which holds its event loop up.
                if front_end.ready and silent_s > SILENCE_FACTOR * self._liveness.dead_after_s:
                    self._lose(front_end, f"nothing was heard of it for {silent_s:.1f} s")

    # --------------------------------------------------------------------------------------------------- messages

    def _send(self, front_end: RemoteFrontEnd, message: messages.ToApiServer, frames: Sequence[Any] = ()) -> None:
        if not self._socket.send(front_end.identity, message, frames):
            # Not from within the dispatcher, which may be telling what it aborts.
            asyncio.get_running_loop().call_soon(self._lose, front_end, "its connection is gone")

    def _bad_frame(self, identity: bytes, reason: str) -> None:
        self._metrics.api_server_bad_frames.inc()
        front_end = self._front_ends.get(identity)
        name = front_end.name if front_end is not None else "unknown"
        log.warning("bad_api_server_frame name=%s connection=%s reason=%s", name, identity.hex(), reason)

    def _take(self, identity: bytes, message: messages.FromApiServer, frames: Sequence[zmq.Frame]) -> None:
        if isinstance(message, messages.Hello):
            self._hello(identity, message)
            return
        front_end = self._front_ends.get(identity)
        if front_end is None or self._open is None:
            # It was given up and goes on all the same: after a SIGSTOP, for instance.
            self._socket.send(identity, messages.Leave("the dispatcher has given this process up"))
            return
        front_end.heard_s = time.monotonic()
        match message:
            case messages.Add():
                self._add(self._open.dispatcher, front_end, message, frames)
            case messages.Abort(request_ids, answered):
                own_ids = [front_end.prefix + request_id for request_id in request_ids]
                self._open.dispatcher.abort(own_ids, answered=answered)
            case messages.Call():
                self._spawn(self._call(self._open.pool, front_end, message), f"engine call of {front_end.name}")
            case messages.LoadAdapter():
                self._spawn(self._load_adapter(self._open.pool, front_end, message), f"adapter of {front_end.name}")
            case messages.AdaptersKnown(version):
                front_end.adapters_version = version
                self._adapters_known.set()
            case messages.Control():
                self._spawn(self._control(front_end, message), f"control request of {front_end.name}")
            case messages.Ready():
                front_end.ready = True
                self._changed.set()
                self._on_ready(front_end.name)
            case messages.Beat():
                pass

    def _add(
        self, dispatcher: Dispatcher, front_end: RemoteFrontEnd, add: messages.Add, frames: Sequence[zmq.Frame]
    ) -> None:
        if not front_end.arrivals.admits(add.request_id, add.group, add.choices):
            return
        try:
            request = self._decoder.decode(frames)
            shape = replace(describe(request, self._returns_routed_experts), standing=add.standing)
        except (BadRequest, ClientTransferParams) as error:
            self._bad_frame(front_end.identity, f"the request {add.request_id} cannot be read: {error}")
            front_end.fail(add.request_id, 500, "The request was damaged on its way to the dispatcher; try again", None)
            return
        group = front_end.prefix + add.group if add.group else ""
        dispatcher.add(front_end.prefix + add.request_id, request, shape, group, add.choices, front_end)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        task.add_done_callback(log_failure)

    async def _call(self, pool: WorkerPool, front_end: RemoteFrontEnd, call: messages.Call) -> None:
        error, results = "", []
        try:
            results = list((await pool.call_all(call.method, *msgspec.msgpack.decode(call.args))).values())
        except (UtilityError, msgspec.DecodeError, RecursionError, TypeError) as failure:
            error = str(failure)
        packed = msgspec.Raw(msgspec.msgpack.encode(results))
        self._send(front_end, messages.CallReply(call.call_id, error, packed))

    async def _load_adapter(self, pool: WorkerPool, front_end: RemoteFrontEnd, wanted: messages.LoadAdapter) -> None:
        error, adapter = "", wanted.adapter
        try:
            adapter = await pool.adapters.load(adapter, again=wanted.again)
        except UtilityError as failure:
            error = str(failure)
        self._send(front_end, messages.AdapterLoaded(wanted.call_id, error, adapter))

    async def _tell_adapters(self, adapters: list[Adapter]) -> None:
        """Returns when every process resolves requests with these."""
        version = self._adapters.version + 1
        self._adapters = messages.Adapters(version, adapters)
        for front_end in list(self._front_ends.values()):
            self._send(front_end, self._adapters)
        deadline_s = time.monotonic() + ADAPTERS_KNOWN_WITHIN_S
        while late := [f.name for f in self._front_ends.values() if f.ready and f.adapters_version < version]:
            self._adapters_known.clear()
            try:
                await asyncio.wait_for(self._adapters_known.wait(), deadline_s - time.monotonic())
            except TimeoutError:
                log.warning("adapters_not_known names=%s version=%d", ",".join(late), version)
                return

    async def _control(self, front_end: RemoteFrontEnd, request: messages.Control) -> None:
        if self._desk is None:
            reply = error_reply(request.call_id, 503, "the cluster is starting")
        else:
            reply = await self._desk.answer(request)
        self._send(front_end, reply)

    def close(self) -> None:
        """Closes the socket."""
        self._beats.cancel()
        for answer in self._answers:
            answer.cancel()
        self._socket.close(LAST_WORDS_MS)
