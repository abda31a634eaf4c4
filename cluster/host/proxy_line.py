"""A host's line to the proxy: it says who the worker is and that it lives, hears what is to be done, and says goodbye.

Real and simulated hosts lead the same conversation (`cluster/messages.py`). What they do with requests is their own.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from cluster import messages as wire
from cluster.config import Role
from cluster.frames import BadFrame, reader
from cluster.host.drain import Carried
from cluster.host.drain_watch import DrainWatch
from cluster.host.leaving import WorkerStopped
from cluster.prefix_events.teller import CacheTeller
from cluster.trust import call_with_key
from cluster.worker_settings import HostSettings

log = logging.getLogger("twinpool.worker")

GOODBYE_S = 0.5
OUTBOX_S = 1.0
MAX_UNSENT = 1_000
"""While so much waits to be sent, nobody reads it, and another beat would only wait behind it."""

Order = (
    wire.Submit
    | wire.Abort
    | wire.FirstToken
    | wire.MeetExporters
    | wire.DropTransfers
    | wire.HoldTransfers
    | wire.Utility
)
"""What the proxy wants done with requests, transfers and the engine."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a host's hello says of its engine and ranks."""

    engine: wire.EngineFacts
    ranks: list[wire.RankAddress]
    fingerprint: str
    layout_fields: dict[str, str]


class Host(Protocol):
    """What a line asks of the host that it belongs to. Nothing is asked before `begin`."""

    @property
    def num_requests(self) -> int:
        """That it has and has not finished."""

    @property
    def transfers_open(self) -> int:
        """Exports and imports, as last counted."""

    def introduction(self) -> Introduction: ...
    def load(self) -> wire.WorkerLoad: ...

    async def obey(self, order: Order, frames: list[bytes]) -> None:
        """Nothing else is read from the proxy meanwhile. `frames` follow a `Submit`."""

    async def drop_everything(self) -> None:
        """Nobody waits for its requests and transfers any more."""


class ProxyLine:
    """Used on the host's event loop; owns the socket.

    Args:
        context: of the running loop.
        worker_id, role: of the worker; the role is the one that it starts in.
        host: carries out what the proxy orders.
    """

    def __init__(
        self, context: zmq.asyncio.Context, settings: HostSettings, worker_id: str, role: Role, host: Host
    ) -> None:
        self.epoch = uuid.uuid4().hex
        """Of this life of the worker."""
        self.proxy_epoch = ""
        """Of the proxy that the worker belongs to; empty while there is none."""
        self.bad_frames = 0
        """Dropped by this host."""
        self.cache = CacheTeller(self.epoch, self.tell)
        """Tells the proxy what the prefix cache holds."""
        self._settings = settings
        self._worker_id = worker_id
        self._host = host
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, round(GOODBYE_S * 1e3))
        self._socket.setsockopt(zmq.IDENTITY, f"{worker_id}.{self.epoch}".encode())
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._encoder = msgspec.msgpack.Encoder()
        self._read_frame = reader(msgspec.msgpack.Decoder[wire.ToWorker](wire.ToWorker))
        self._drain = DrainWatch(worker_id, role, self.carried, self._say_hello, self._drop_everything)
        self._begun = False
        self._last_work_s = -math.inf
        self._heard_at_s = 0.0
        self._proxies_lost = 0

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """The engine is up: calls the proxy. What is started here raises `WorkerStopped` when the worker must leave."""
        call_with_key(self._socket, self._settings.proxy_address, self._settings.key)
        self._socket.connect(self._settings.proxy_address)
        for part in (self._send, self._read, self._beat, self._leave_when_drained):
            tasks.create_task(part())
        self._begun = True

    def tell(self, message: wire.FromWorker, frames: Sequence[Any] = ()) -> None:
        """Sends a message to the proxy, without waiting."""
        self._outbox.put_nowait([self._encoder.encode(message), *frames])

    def worked(self) -> None:
        """A request came or ended."""
        self._last_work_s = time.monotonic()
        self.nudge()

    def nudge(self) -> None:
        """Something happened that may end a drain."""
        self._drain.nudge()

    def leave_when_done(self) -> bool:
        """The worker finishes what it has and leaves; False if it is on its way out already, or not up yet."""
        if not self._begun or self._drain.goal == wire.LEAVE:
            return False
        self._drain.order(wire.LEAVE, self._settings.drain_timeout_s)
        return True

    async def close(self, cause: str) -> None:
        """Says goodbye, if there was a proxy; to be called when the tasks of `begin` have ended."""
        if self._heard_at_s:
            goodbye = wire.Goodbye(self._worker_id, self.epoch, cause)
            try:
                await asyncio.wait_for(self._socket.send_multipart([self._encoder.encode(goodbye)]), GOODBYE_S)
            except (TimeoutError, zmq.ZMQError) as error:
                log.warning("goodbye_not_sent worker=%s error=%s", self._worker_id, error)
        self._socket.close()

    # --- the socket ------------------------------------------------------------------------------

    async def _send(self) -> None:
        """The only writer until `close`."""
        while True:
            await self._socket.send_multipart(await self._outbox.get(), copy=False)
            self._outbox.task_done()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._heard_at_s = time.monotonic()
            try:
                message = self._read_frame(frames[0])
            except BadFrame as error:
                self.bad_frames += 1
                log.warning("bad_proxy_frame worker=%s error=%s", self._worker_id, error)
                continue
            await self._take(message, frames[1:])

    async def _take(self, message: wire.ToWorker, frames: list[bytes]) -> None:
        match message:
            case wire.Welcome(proxy_epoch=epoch):
                if self.proxy_epoch and epoch != self.proxy_epoch:
                    await self._forget_proxy("another proxy took over")
                self.proxy_epoch = epoch
                self.cache.begin()
                log.info("joined worker=%s proxy_epoch=%s", self._worker_id, epoch)
            case wire.ProxyBeat(proxy_epoch=epoch):
                if epoch != self.proxy_epoch:
                    self._say_hello()
            case wire.TellCachedBlocks():
                self.cache.begin()
            case wire.Drain(goal=goal, timeout_s=timeout_s):
                self._drain.order(goal, timeout_s)
            case wire.NothingMore(drain=number):
                self._drain.nothing_more(number)
            case wire.Rejected(reason=reason):
                raise WorkerStopped(f"the proxy refused this worker: {reason}", 2)
            case wire.Shutdown():
                raise WorkerStopped("the proxy shut down", 0)
            case _:
                await self._host.obey(message, frames)

    # --- liveness --------------------------------------------------------------------------------

    async def _beat(self) -> None:
        liveness = self._settings.liveness
        while True:
            if not self.proxy_epoch:
                if self._outbox.qsize() < MAX_UNSENT:
                    self._say_hello()
            else:
                if self._drain.goal:
                    self._say_hello()  # a proxy that missed it would go on sending
                self.tell(self._host.load())
                if time.monotonic() - self._heard_at_s > liveness.proxy_lost_after_s:
                    await self._forget_proxy(f"the proxy was silent for {liveness.proxy_lost_after_s:g} s")
            await asyncio.sleep(liveness.heartbeat_s)

    async def _forget_proxy(self, why: str) -> None:
        num_requests = self._host.num_requests
        log.warning("proxy_lost worker=%s reason=%s requests=%d", self._worker_id, why, num_requests)
        self.proxy_epoch = ""
        self.cache.pause()
        await self._drop_everything()

    async def _drop_everything(self) -> None:
        self._proxies_lost += 1
        self.nudge()
        await self._host.drop_everything()

    def _say_hello(self) -> None:
        about = self._host.introduction()
        self.tell(
            wire.WorkerHello(
                protocol=wire.PROTOCOL_VERSION,
                worker_id=self._worker_id,
                role=self._drain.role,
                epoch=self.epoch,
                proxies_lost=self._proxies_lost,
                pid=os.getpid(),
                hostname=socket.gethostname(),
                engine=about.engine,
                ranks=about.ranks,
                fingerprint=about.fingerprint,
                layout_fields=about.layout_fields,
                drains_to=self._drain.goal,
                drain=self._drain.number,
            )
        )

    # --- draining --------------------------------------------------------------------------------

    def carried(self) -> Carried:
        """What the worker has now."""
        return Carried(self._host.num_requests, self._host.transfers_open, self._last_work_s, bool(self.proxy_epoch))

    async def _leave_when_drained(self) -> None:
        cause = await self._drain.run()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._outbox.join(), OUTBOX_S)  # what it has said comes before its Goodbye
        raise WorkerStopped(cause, 0)
