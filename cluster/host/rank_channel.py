"""The host's socket towards its engine's ranks and scheduler (`kvtransfer.host_messages`)."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from cluster.frames import BadFrame, reader
from cluster.trust import ClusterKey, Door, attend, is_network
from kvtransfer.host_messages import FromRank, PoolStats, RankReady, RankStats, ToRank

log = logging.getLogger("twinpool.cluster")

MAX_FRAME_BYTES = 1 << 20


class RankChannel:
    """Knows each rank's identity, keeps the newest statistics, hands events to `on_event`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        on_event: Callable[[FromRank], None],
        key: ClusterKey | None = None,
    ) -> None:
        """`key`: what ranks on other nodes must show; not over ipc."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)  # ZMQ cuts the connection above this
        self._door = Door(context, self._socket, key if is_network(address) else None)
        self._socket.bind(address)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """With the port that the system chose."""
        self._on_event = on_event
        self._read = reader(msgspec.msgpack.Decoder[FromRank](FromRank), MAX_FRAME_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._identities: dict[int, bytes] = {}
        self.ready: dict[int, RankReady] = {}
        self.stats: dict[int, RankStats] = {}
        self.pool: PoolStats | None = None
        """None until the engine has made a step: before, it has nothing to say."""
        self.bad_frames = 0

    async def run(self) -> None:
        """Reads until cancelled. Frames that are no message of a rank are dropped and counted."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_all())
            if self._door.sockets:
                tasks.create_task(attend(self._door))

    async def _read_all(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 2:
                    raise BadFrame(f"{len(frames) - 1} frames where one was expected")
                identity, body = frames
                message = self._read(body)
            except BadFrame as error:
                self.bad_frames += 1
                log.warning("bad_rank_frame frames=%d error=%s", len(frames), error)
                continue
            match message:
                case RankReady():
                    self._identities[message.rank] = identity
                    self.ready[message.rank] = message
                case RankStats():
                    self.stats[message.rank] = message
                case PoolStats():
                    self.pool = message
                case _:
                    pass
            self._on_event(message)

    async def tell_all(self, message: ToRank) -> None:
        """To every rank that has reported; a rank that is gone does not hold up the others."""
        body = self._encoder.encode(message)
        for identity in self._identities.values():
            await self._socket.send_multipart([identity, body])

    @property
    def refused(self) -> dict[str, int]:
        """Connections that were turned away, by reason."""
        return dict(self._door.refused)

    def close(self) -> None:
        self._door.close()
        self._socket.close()
