"""The exporters that a rank reads from: greeting them, agreeing on a link, keeping it alive, losing it.

No I/O, no clock. What it decides is in `outbox`, `lost`, `mappings` and `nccl.orders`; whoever carries it out clears
them. The endpoint's thread is the only caller.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.importing.nccl_imports import EndedPiece, NcclImports
from kvtransfer.endpoint.peers import ExporterPeer, PeerKey, RankIdentity
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheMap, Region
from kvtransfer.links.nccl_orders import NcclEvent
from kvtransfer.messages import (
    Attach,
    Beat,
    BeatAck,
    CommBroken,
    CommOffer,
    Fetch,
    FromImporter,
    Refused,
    Release,
    Sending,
    SharedAllocation,
    Welcome,
)
from kvtransfer.region_runs import LayerRegions
from kvtransfer.resharding.shares import NotShareable
from kvtransfer.transfers.imports import Import, Piece

log = logging.getLogger("twinpool.kvtransfer")


@dataclass(frozen=True)
class WantedMapping:
    """An exporter's GPU memory that is to be mapped."""

    key: PeerKey
    allocations: list[SharedAllocation]
    layers: tuple[tuple[Region, ...], ...]
    """At the exporter's addresses."""


class ExporterLinks:
    def __init__(
        self,
        settings: EndpointSettings,
        cache: CacheMap,
        identity: RankIdentity,
        why_unreadable: Callable[[int, int], str],
        fail: Callable[[Import, str, str], None],
    ) -> None:
        """`why_unreadable`: why this process cannot read that one (pid, address); empty when it can. `fail`: an import
        gets nothing more of its exporter (kind, reason); lets go of it.
        """
        self._settings = settings
        self._cache = cache
        self._identity = identity
        self._why_unreadable = why_unreadable
        self._fail = fail
        self._peers: dict[PeerKey, ExporterPeer] = {}
        self._peer_of: dict[Import, ExporterPeer] = {}  # while the import wants something of it
        self.outbox: list[tuple[PeerKey, FromImporter]] = []
        self.lost: list[PeerKey] = []
        self.mappings: list[WantedMapping] = []
        self.nccl = NcclImports(settings, cache)

    @property
    def needs_sweep(self) -> bool:
        is_waiting = any(peer.imports or peer.answer_until_s < math.inf for peer in self._peers.values())
        return is_waiting or self.nccl.pairs.needs_sweep

    def __iter__(self) -> Iterator[ExporterPeer]:
        return iter(self._peers.values())

    def get(self, key: PeerKey) -> ExporterPeer | None:
        return self._peers.get(key)

    def of(self, reader: Import) -> ExporterPeer | None:
        """None once the import wants nothing more of its exporter."""
        return self._peer_of.get(reader)

    def described(self) -> dict[str, str]:
        """Per address: the link and why, or the refusal."""
        return {
            peer.key.address: f"refused: {peer.refusal}" if peer.refusal else f"{peer.link}: {peer.why}"
            for peer in self._peers.values()
            if peer.refusal or peer.link
        }

    # What imports need.

    def meet(self, now_s: float, key: PeerKey) -> None:
        """Get the link ready; a transfer will come from there."""
        if key not in self._peers:
            self._greet(now_s, key)

    def join(self, now_s: float, key: PeerKey, opened: Import) -> None:
        """Attach as soon as there is a link."""
        is_read = opened.source.num_heads > 0
        peer = self._peers.get(key) or self._greet(now_s, key, is_read)
        if peer.refusal:
            self._fail(opened, "refused", peer.refusal)
            return
        peer.imports[opened.transfer_id] = opened
        self._peer_of[opened] = peer
        if peer.link:
            self._attach(now_s, peer, opened)
        if not is_read:
            self.let_go(opened)  # all it has to tell is that nothing is wanted

    def let_go(self, settled: Import) -> None:
        """Release the exporter once nothing is wanted of it."""
        if peer := self._peer_of.get(settled):
            if settled.is_over:
                peer.forget_fetches(settled)
            if not settled.wants_exporter:
                del self._peer_of[settled], peer.imports[settled.transfer_id]
                peer.with_work.pop(settled.transfer_id, None)
                if peer.link:
                    self._tell(peer, Release(settled.transfer_id, settled.bytes_moved, settled.copy_s))
                else:
                    peer.abandoned.append(settled)

    def can_ask(self, peer: ExporterPeer) -> bool:
        """The exporter sends on request."""
        return peer.link == "zmq" or (peer.link == "nccl" and self.nccl.pairs.is_ready(peer.key))

    def fetch_bytes(self, peer: ExporterPeer) -> int:
        """The most that may be asked for at once, while it can be asked."""
        return self.nccl.pairs.staging_bytes(peer.key) if peer.link == "nccl" else self._settings.chunk_bytes

    def fetch(self, now_s: float, peer: ExporterPeer, reader: Import, piece: Piece) -> None:
        """Ask for it, as soon as it can be asked for."""
        peer.fetches[piece.piece_id] = (reader, piece, now_s)
        if not self.can_ask(peer):
            return  # asked for when there is a communicator
        generation = self.nccl.pairs.generation(peer.key) if peer.link == "nccl" else 0
        layers, block_ids = (piece.first_layer, piece.num_layers), list(piece.source_ids)
        self._tell(peer, Fetch(piece.transfer_id, piece.attempt, piece.piece_id, *layers, block_ids, generation))

    # What exporters say of themselves and of their links.

    def receive(
        self,
        now_s: float,
        peer: ExporterPeer,
        message: Welcome | Refused | BeatAck | CommOffer | CommBroken | Sending,
    ) -> None:
        """Raises BadFrame for a message that no correct exporter sends."""
        match message:
            case Welcome():
                self._welcomed(now_s, peer, message)
            case Refused(epoch) if epoch != peer.key.epoch:
                self._lose(peer, f"the exporter there is epoch {epoch} now: it was restarted")
            case Refused(_, reason, differing_fields):
                self._refused(peer, f"{reason} (differing: {', '.join(differing_fields) or 'unknown'})")
            case BeatAck(lease_until_s, transfer_ids, unknown_ids):
                peer.answer_until_s = math.inf
                for transfer_id in transfer_ids:
                    if held := peer.imports.get(transfer_id):
                        held.lease_until_s = max(held.lease_until_s, lease_until_s)
                for transfer_id in unknown_ids:
                    if unknown := peer.imports.get(transfer_id):
                        self._fail(unknown, "unknown_transfer", "the exporter holds this transfer no more")
            case CommOffer() | CommBroken() | Sending():
                self.nccl.receive(now_s, peer, message)
                self._follow_nccl(now_s)

    def lose(self, key: PeerKey, reason: str) -> None:
        """It is gone, or cannot be reached."""
        if peer := self._peers.get(key):
            self._lose(peer, reason)

    def mapped(self, now_s: float, key: PeerKey, layers: tuple[tuple[Region, ...], ...], reason: str) -> None:
        """The memory of an exporter is mapped, or cannot be for that reason."""
        peer = self._peers.get(key)
        if peer is None or peer.preparing != "cuda_ipc":
            return
        if reason:
            self._pass_over(now_s, peer, "cuda_ipc", reason)
        else:
            peer.layers = LayerRegions(layers)
            self._agreed(now_s, peer)

    # Communicators.

    def nccl_event(self, now_s: float, event: NcclEvent, on_ended: Callable[[PeerKey, EndedPiece], None]) -> None:
        """What the device's thread says of them. `on_ended` is called if a piece has arrived, or cannot."""
        key: PeerKey = event.pair.peer
        if ended := self.nccl.event(now_s, key, event):
            on_ended(key, ended)
        self._follow_nccl(now_s)

    def want_communicator(self, now_s: float, peer: ExporterPeer) -> None:
        """Ask for it if it is needed and gone."""
        wants_pair = peer.preparing == "nccl" or (peer.link == "nccl" and (peer.with_work or peer.fetches))
        if wants_pair and not self.nccl.pairs.is_ready(peer.key):
            self.nccl.pairs.want(now_s, peer.key)

    def collect_nccl_messages(self) -> None:
        self.outbox += self.nccl.take_messages()

    def _follow_nccl(self, now_s: float) -> None:
        """Do what follows from communicators that have come or gone."""
        for key in self.nccl.take_ready():
            if peer := self._peers.get(key):
                if peer.preparing == "nccl":
                    self._agreed(now_s, peer)
                for reader, piece, _ in list(peer.fetches.values()):
                    self.fetch(now_s, peer, reader, piece)
        for key, reason in self.nccl.take_given_up():
            if peer := self._peers.get(key):
                self._pass_over(now_s, peer, "nccl", reason)
        self.collect_nccl_messages()

    # What time says.

    def sweep(self, now_s: float) -> None:
        self.nccl.pairs.sweep(now_s)
        self._follow_nccl(now_s)
        for peer in list(self._peers.values()):
            if peer.answer_until_s <= now_s and peer.preparing:
                reason = f"not ready within {self._settings.prepare_within_s:g} s"
                self._pass_over(now_s, peer, peer.preparing, reason)
                continue
            if peer.answer_until_s <= now_s:
                self._lose(peer, f"no answer for {self._settings.peer_lost_after_s:g} s")
                continue
            if peer.link and peer.imports and peer.next_beat_s <= now_s:
                self._tell(peer, Beat(list(peer.imports)))
                peer.next_beat_s = now_s + self._settings.beat_s
                if peer.answer_until_s == math.inf:
                    peer.answer_until_s = now_s + self._settings.peer_lost_after_s
            stalled_s = self._settings.stalled_after_s
            for reader, _, sent_s in list(peer.fetches.values()):
                if sent_s + stalled_s <= now_s and reader.transfer_id in peer.imports:
                    self._fail(reader, "transport", f"a fetch had no answer for {stalled_s:g} s")

    def _greet(self, now_s: float, key: PeerKey, is_read: bool = True) -> ExporterPeer:
        """`is_read`: blocks will be copied from it; else any link will do, and the plainest is best."""
        peer = self._peers.get(key)
        if peer is None:
            passed_over = {}
            if not is_read and "zmq" in self._settings.links:
                passed_over = {link: "nothing is read" for link in self._settings.links if link != "zmq"}
            peer = self._peers[key] = ExporterPeer(key, passed_over, math.inf, now_s + self._settings.beat_s)
        peer.answer_until_s = now_s + self._settings.peer_lost_after_s
        self._tell(peer, self._identity.hello(self._settings, self._cache.layout, peer))
        return peer

    def _pass_over(self, now_s: float, peer: ExporterPeer, link: str, reason: str) -> None:
        """Ask for another link. What was under way on this one cannot go on."""
        log.warning("link_passed_over address=%s link=%s reason=%r", peer.key.address, link, reason)
        if peer.link:
            for reader in list(peer.imports.values()):
                self._fail(reader, "transport", f"the link {link} failed: {reason}")
        peer.passed_over[link] = reason
        peer.link = peer.preparing = ""
        peer.layers = LayerRegions()
        if link == "nccl":
            self.nccl.pairs.forget(peer.key, reason)
        self.collect_nccl_messages()  # before the exporter hears of another link
        self._greet(now_s, peer.key)

    def _welcomed(self, now_s: float, peer: ExporterPeer, welcome: Welcome) -> None:
        offered = self._identity.link_side(self._settings.links, peer.passed_over).links
        if welcome.epoch != peer.key.epoch or welcome.link not in offered or peer.link or peer.preparing:
            raise BadFrame(f"welcome of epoch {welcome.epoch} with link {welcome.link!r}: neither was asked for")
        try:
            peer.agree(welcome, self._cache, self._settings.rank)
        except NotShareable as error:
            self._refused(peer, f"the KV caches cannot be cut alike: {error}")
            return
        peer.preparing, peer.why, peer.pid = welcome.link, welcome.why, welcome.pid
        if welcome.link == "host" and welcome.regions:
            reason = self._why_unreadable(welcome.pid, welcome.regions[0].base_address)
            if reason:
                self._pass_over(now_s, peer, "host", reason)
                return
        peer.answer_until_s = now_s + self._settings.prepare_within_s
        if welcome.link == "cuda_ipc":
            self.mappings.append(WantedMapping(peer.key, welcome.allocations, peer.layers))
        elif welcome.link == "nccl":
            self.nccl.pairs.want(now_s, peer.key)
        else:
            self._agreed(now_s, peer)

    def _agreed(self, now_s: float, peer: ExporterPeer) -> None:
        """The link is ready."""
        peer.answer_until_s = math.inf
        peer.link, peer.preparing = peer.preparing, ""
        log.info("exporter_welcomed_us address=%s link=%s why=%r", peer.key.address, peer.link, peer.why)
        for waiting in list(peer.imports.values()):
            self._attach(now_s, peer, waiting)
        for given_up in peer.abandoned:
            self._attach(now_s, peer, given_up)
            self._tell(peer, Release(given_up.transfer_id))
        peer.abandoned.clear()

    def _attach(self, now_s: float, peer: ExporterPeer, attached: Import) -> None:
        if len(peer.imports) == 1:
            peer.next_beat_s = now_s + self._settings.beat_s
        attached.link = peer.link
        if peer.units is not None:
            attached.agree(peer.units, now_s)
        source = attached.source
        if peer.tp_size and (peer.rank, peer.tp_size) != (source.exporter_rank, source.exporter_tp):
            self._fail(
                attached,
                "mismatch",
                f"the exporter at {peer.key.address} is rank {peer.rank} of {peer.tp_size}, "
                f"named was rank {source.exporter_rank} of {source.exporter_tp}",
            )
            return
        attach = Attach(
            attached.transfer_id,
            peer.key.epoch,
            attached.num_tokens,
            attached.prompt_hash,
            attached.wants_first_token,
            source.importers_expected,
        )
        self._tell(peer, attach)

    def _refused(self, peer: ExporterPeer, refusal: str) -> None:
        peer.refusal = refusal
        peer.answer_until_s = math.inf
        log.warning("exporter_refused address=%s reason=%r", peer.key.address, refusal)
        self._fail_all(peer, "refused", refusal)

    def _lose(self, peer: ExporterPeer, reason: str) -> None:
        level = logging.WARNING if peer.imports else logging.INFO
        log.log(level, "exporter_lost address=%s epoch=%s reason=%r", peer.key.address, peer.key.epoch, reason)
        del self._peers[peer.key]
        self.outbox[:] = [(key, message) for key, message in self.outbox if key != peer.key]
        self.mappings[:] = [wanted for wanted in self.mappings if wanted.key != peer.key]
        self.lost.append(peer.key)
        self.nccl.pairs.forget(peer.key, reason)
        self._fail_all(peer, "peer_lost", f"exporter at {peer.key.address} lost: {reason}")

    def _fail_all(self, peer: ExporterPeer, kind: str, reason: str) -> None:
        """Nothing is sent to it any more, not even releases."""
        imports, peer.imports, peer.with_work = list(peer.imports.values()), {}, {}
        for failed in imports:
            del self._peer_of[failed]
            peer.forget_fetches(failed)
            self._fail(failed, kind, reason)

    def _tell(self, peer: ExporterPeer, message: FromImporter) -> None:
        self.outbox.append((peer.key, message))
