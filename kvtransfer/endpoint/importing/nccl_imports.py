"""An importer's part in the link `nccl`: sends that are announced become receives. No I/O, no clock."""

from dataclasses import dataclass

from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.peers import ExporterPeer, PeerKey
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheMap
from kvtransfer.links.nccl_orders import Broken, Built, NcclEvent, NcclOrder, PairId, Received
from kvtransfer.links.nccl_pairs import ReceivingPairs
from kvtransfer.messages import CommBroken, CommOffer, CommRequest, Sending
from kvtransfer.transfers.imports import Import, Piece


@dataclass(frozen=True)
class EndedPiece:
    """Nothing writes into its blocks any more."""

    reader: Import
    piece: Piece
    reason: str
    """Why it did not arrive; empty when it did."""
    copy_s: float
    ended_s: float


class NcclImports:
    def __init__(self, settings: EndpointSettings, cache: CacheMap) -> None:
        self.pairs: ReceivingPairs[PeerKey] = ReceivingPairs(
            settings.max_communicators, settings.staging_bytes(cache.layout), settings.prepare_within_s
        )
        self._receiving: dict[tuple[PairId, int], tuple[Import, Piece]] = {}  # by fetch id

    @property
    def orders(self) -> list[NcclOrder]:
        """For the device's thread."""
        return self.pairs.orders

    def receive(self, now_s: float, peer: ExporterPeer, message: CommOffer | CommBroken | Sending) -> None:
        """Raises BadFrame for a message that no correct exporter sends."""
        match message:
            case CommOffer(_, staging_bytes) if staging_bytes < peer.largest_layer_bytes:
                raise BadFrame(f"an offer of a communicator with buffers of {staging_bytes} bytes")
            case CommOffer():
                self.pairs.offered(peer.key, message)
            case CommBroken():
                self.pairs.dropped(now_s, peer.key, message)
            case Sending():
                self._receive_blocks(now_s, peer, message)

    def event(self, now_s: float, key: PeerKey, event: NcclEvent) -> EndedPiece | None:
        match event:
            case Built():
                self.pairs.built(key, event)
            case Broken():
                self.pairs.broke(now_s, key, event)
            case Received(pair, fetch_id, reason, copy_s, ended_s):
                self.pairs.received(key, event)
                if received := self._receiving.pop((pair, fetch_id), None):
                    return EndedPiece(*received, reason, copy_s, ended_s)
        return None

    def take_messages(self) -> list[tuple[PeerKey, CommRequest | CommBroken]]:
        messages, self.pairs.outbox = self.pairs.outbox, []
        return messages

    def take_ready(self) -> list[PeerKey]:
        """Exporters with which there is a communicator now."""
        ready, self.pairs.ready = self.pairs.ready, []
        return ready

    def take_given_up(self) -> list[tuple[PeerKey, str]]:
        """Exporters for which another link must do, and why."""
        given_up, self.pairs.given_up = self.pairs.given_up, []
        return given_up

    def _receive_blocks(self, now_s: float, peer: ExporterPeer, sending: Sending) -> None:
        """The exporter has begun to send: receive, whether or not the blocks are still wanted."""
        reader, piece, _ = peer.fetches.get(sending.fetch_id, (None, None, 0.0))
        pair = self.pairs.sending(now_s, peer.key, sending, piece.num_bytes if piece else None)
        if pair is None:
            return
        if reader is None or piece is None:
            self.pairs.receive(pair, sending)
            return
        del peer.fetches[sending.fetch_id]
        self._receiving[pair, piece.piece_id] = (reader, piece)
        self.pairs.receive(pair, sending, piece.target_ids, peer.target_regions(piece))
