"""How simulated workers reach each other: a process listens on one socket and has one to each that it writes to."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from cluster.frames import BadFrame, reader
from cluster.simulated.transfers.exports import Letter
from cluster.simulated.transfers.messages import Failed, PeerMessage, Wanted
from cluster.trust import ClusterKey, Door, attend, call_with_key, is_network

log = logging.getLogger("twinpool.simulated")

_MAX_PEERS = 512
_QUEUE = 10_000
"""Messages kept for a peer that is not there. Importers repeat themselves, so what is dropped is not missed."""


class PeerExchange:
    """All of a process's letters. Made and used on one event loop."""

    def __init__(self, context: zmq.asyncio.Context, bind: str, key: ClusterKey | None = None) -> None:
        """Binds at once. Raises `zmq.ZMQError`. Over tcp only who holds the key is listened to."""
        self.bad_frames = 0
        """Dropped by this process; each of its workers reports them, since they were for none in particular."""
        self._context = context
        self._mailboxes: dict[str, Callable[[PeerMessage], None]] = {}
        self._read = reader(msgspec.msgpack.Decoder[PeerMessage](PeerMessage))
        self._encoder = msgspec.msgpack.Encoder()
        self._peers: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.RCVHWM, _QUEUE)
        self._key = key
        self._door = Door(context, self._inbox, key if is_network(bind) else None)
        self._inbox.bind(bind)
        self.address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)

    def join(self, epoch: str, mailbox: Callable[[PeerMessage], None]) -> None:
        """A worker of this process that can be written to."""
        self._mailboxes[epoch] = mailbox

    def leave(self, epoch: str) -> None:
        """A worker that is gone."""
        self._mailboxes.pop(epoch, None)

    def send(self, letters: list[Letter]) -> None:
        """Sends, or drops when the peer has not read for long, or its address is none."""
        for address, message in letters:
            try:
                self._peer(address).send(self._encoder.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                self.bad_frames += 1
                log.warning("no_peer_address address=%s error=%s", address, error)

    def _peer(self, address: str) -> "zmq.Socket[bytes]":
        peer = self._peers.get(address)
        if peer is None:
            # A plain socket: sending never waits.
            peer = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.SNDHWM, _QUEUE)
            try:
                call_with_key(peer, address, self._key)
                peer.connect(address)
            except zmq.ZMQError:
                peer.close()
                raise
            self._peers[address] = peer
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end(address)
        return peer

    async def run(self) -> None:
        """Delivers letters until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver())
            if self._door.sockets:
                tasks.create_task(attend(self._door))

    async def _deliver(self) -> None:
        while True:
            frame = await self._inbox.recv()
            try:
                message = self._read(frame)
            except BadFrame as error:
                self.bad_frames += 1
                log.warning("bad_peer_frame error=%s", error)
                continue
            mailbox = self._mailboxes.get(message.to)
            if mailbox is not None:
                mailbox(message)
            elif isinstance(message, Wanted):
                self.send([(message.reply_address, Failed(message.reply_to, message.transfer_id, "peer_lost"))])

    def close(self) -> None:
        """Closes every socket."""
        for peer in self._peers.values():
            peer.close()
        self._door.close()
        self._inbox.close()
