"""All imports of one rank and the exporters they come from: messages in, messages and copies out. No sockets, no clock.

The endpoint's thread is the only caller.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.endpoint.copy_thread import CopyJob, CopyResult
from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.nccl_imports import NcclImports
from kvtransfer.endpoint.peers import ExporterPeer, PeerKey, RankIdentity, next_piece
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.imports import ClosedImport, Import, Piece
from kvtransfer.layout import CacheMap, Region
from kvtransfer.links.nccl_orders import NcclEvent
from kvtransfer.links.negotiation import READING_LINKS
from kvtransfer.messages import (
    FAILURE_KINDS,
    Attach,
    Attached,
    Beat,
    BeatAck,
    Blocks,
    CommBroken,
    CommOffer,
    Done,
    Failed,
    Fetch,
    FromExporter,
    FromImporter,
    Ready,
    Refused,
    Release,
    Sending,
    SharedAllocation,
    Welcome,
)
from kvtransfer.resharding.heads import ONLY_SOURCE, UnevenHeads
from kvtransfer.resharding.shares import NotShareable
from kvtransfer.sharded_import import ShardedImport, sources_of

log = logging.getLogger("twinpool.kvtransfer")

_COPIES_AT_ONCE = 2
"""One being copied and one waiting, so that the copy thread never idles between them."""
_COPY_CHUNKS = {"host": 16, "cuda_ipc": 256}
"""A copy has no message to bound it; this many chunks keep cancelling quick (some ms) and transfers fair."""
_EARLY_TOKENS_KEPT = 1024


@dataclass(frozen=True)
class WantedMapping:
    """An exporter's GPU memory that is to be mapped."""

    key: PeerKey
    allocations: list[SharedAllocation]
    layers: tuple[tuple[Region, ...], ...]
    """At the exporter's addresses."""


class Memory(Protocol):
    """What the importer has done to memory at once."""

    def why_unreadable(self, pid: int, address: int) -> str:
        """Why this process cannot read that one; empty when it can."""

    def scatter(self, piece: Piece, targets: Sequence[Region], payload: memoryview) -> None:
        """Write the bytes of `piece` into our blocks. Raises ValueError when their number is wrong."""


class Importer:
    def __init__(self, settings: EndpointSettings, cache: CacheMap, identity: RankIdentity, memory: Memory) -> None:
        self._settings = settings
        self._cache = cache
        self._identity = identity
        self._memory = memory
        self._imports: dict[str, ShardedImport] = {}
        self._peers: dict[PeerKey, ExporterPeer] = {}
        self._peer_of: dict[Import, ExporterPeer] = {}  # while the import wants something of it
        self._copying: dict[int, Import] = {}
        self._early_tokens: dict[str, int] = {}
        self._last_piece_id = 0
        self.outbox: list[tuple[PeerKey, FromImporter]] = []
        self.lost: list[PeerKey] = []
        self.copies: list[CopyJob] = []
        self.mappings: list[WantedMapping] = []
        self.nccl = NcclImports(settings, cache)
        self.closed: list[ClosedImport] = []
        self.failures: Counter[str] = Counter()
        self.bytes_in: Counter[str] = Counter()
        self.copy_s: dict[str, float] = {}

    @property
    def num_open(self) -> int:
        return len(self._imports)

    @property
    def needs_sweep(self) -> bool:
        is_waiting = any(peer.imports or peer.answer_until_s < math.inf for peer in self._peers.values())
        return is_waiting or self.nccl.pairs.needs_sweep

    def peers(self) -> dict[str, str]:
        """Per address: the link and why, or the refusal."""
        return {
            peer.key.address: f"refused: {peer.refusal}" if peer.refusal else f"{peer.link}: {peer.why}"
            for peer in self._peers.values()
            if peer.refusal or peer.link
        }

    # What the engine and the proxy say.

    def meet(self, now_s: float, exporters: Sequence[PeerKey]) -> None:
        """Get the links to those of a prefill worker's ranks ready that transfers will come from."""
        try:
            sources = sources_of(self._cache.layout, self._settings.rank, exporters)
        except UnevenHeads as error:
            log.warning("exporter_not_met reason=%r", str(error))
            return
        for source in sources:
            key = exporters[source.exporter_rank]
            if source.num_heads and key not in self._peers:
                self._greet(now_s, key)

    def open(
        self,
        now_s: float,
        transfer_id: str,
        exporters: Sequence[PeerKey],
        prompt_hash: bytes,
        num_tokens: int,
        wants_first_token: bool,
    ) -> None:
        """`exporters`: every rank of the prefill worker, by rank."""
        if transfer_id in self._imports:
            log.warning("import_opened_twice transfer=%s", transfer_id)
            return
        layout, refusal = self._cache.layout, ""
        try:
            sources = sources_of(layout, self._settings.rank, exporters)
        except UnevenHeads as error:
            refusal, sources = str(error), (ONLY_SOURCE,)
        shards = []
        for source in sources:
            wants_token = wants_first_token and source.num_heads > 0
            shards.append(Import(transfer_id, layout, num_tokens, prompt_hash, wants_token, now_s, source))
        self._imports[transfer_id] = ShardedImport(shards)
        early_token = self._early_tokens.pop(transfer_id, None)
        for opened in shards:
            if early_token is not None:
                opened.give_first_token(early_token)
            if refusal:
                opened.fail("refused", refusal)
            if not opened.source.num_heads:
                opened.place(0, [], now_s)
            if not opened.is_over:
                self._join(now_s, exporters[opened.source.exporter_rank], opened)
        self._settle(shards[0])

    def _join(self, now_s: float, key: PeerKey, opened: Import) -> None:
        is_read = opened.source.num_heads > 0
        peer = self._peers.get(key) or self._greet(now_s, key, is_read)
        if peer.refusal:
            opened.fail("refused", peer.refusal)
            self._settle(opened)
            return
        peer.imports[opened.transfer_id] = opened
        self._peer_of[opened] = peer
        if peer.link:
            self._attach(now_s, peer, opened)
        if not is_read:
            self._let_go(opened)  # all it has to tell is that nothing is wanted

    def place(self, now_s: float, transfer_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        if not (placed := self._imports.get(transfer_id)):
            log.warning("import_unknown transfer=%s verb=placed", transfer_id)
            return
        for shard in placed.shards:
            shard.place(first_block, block_ids, now_s)
            if peer := self._peer_of.get(shard):
                peer.with_work[transfer_id] = shard
            self._settle(shard)

    def give_first_token(self, now_s: float, transfer_id: str, token: int) -> None:
        if known := self._imports.get(transfer_id):
            for shard in known.shards:
                shard.give_first_token(token)
                self._settle(shard)
            return
        self._early_tokens[transfer_id] = token  # the proxy may be faster than our own engine
        if len(self._early_tokens) > _EARLY_TOKENS_KEPT:
            del self._early_tokens[next(iter(self._early_tokens))]

    def cancel(self, now_s: float, transfer_id: str) -> None:
        if cancelled := self._imports.get(transfer_id):
            for shard in cancelled.shards:
                shard.cancel()
            for shard in cancelled.shards:
                self._settle(shard)

    def cancel_all(self, now_s: float) -> None:
        for transfer_id in list(self._imports):
            self.cancel(now_s, transfer_id)

    # What exporters say.

    def receive(self, now_s: float, key: PeerKey, message: FromExporter, payload: memoryview | None) -> None:
        """Raises BadFrame for a message that no correct exporter sends."""
        peer = self._peers.get(key)
        if peer is None:
            return
        if isinstance(message, Blocks) != (payload is not None):
            raise BadFrame(f"{type(message).__name__} {'without' if payload is None else 'with'} a payload")
        match message:
            case Welcome():
                self._welcomed(now_s, peer, message)
            case Refused(epoch) if epoch != key.epoch:
                self._lose(peer, f"the exporter there is epoch {epoch} now: it was restarted")
            case Refused(_, reason, differing_fields):
                self._refused(peer, f"{reason} (differing: {', '.join(differing_fields) or 'unknown'})")
            case BeatAck(lease_until_s, transfer_ids, unknown_ids):
                peer.answer_until_s = math.inf
                for transfer_id in transfer_ids:
                    if held := peer.imports.get(transfer_id):
                        held.lease_until_s = max(held.lease_until_s, lease_until_s)
                for transfer_id in unknown_ids:
                    self._fail(peer, transfer_id, "unknown_transfer", "the exporter holds this transfer no more")
            case Blocks():
                self._arrived(now_s, peer, message, payload or memoryview(b""))
            case CommOffer() | CommBroken() | Sending():
                self.nccl.receive(now_s, peer, message)
                self._follow_nccl(now_s)
            case Failed(transfer_id, kind, reason):
                self._fail(peer, transfer_id, kind if kind in FAILURE_KINDS else "transport", reason)
            case Attached() | Ready() | Done():
                if told := peer.imports.get(message.transfer_id):
                    self._progress(now_s, peer, told, message)

    def exporter_lost(self, key: PeerKey, reason: str) -> None:
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
            peer.layers = layers
            self._agreed(now_s, peer)

    # What the copy thread says.

    def copied(self, result: CopyResult) -> None:
        piece = result.job.piece
        reader = self._copying.pop(piece.piece_id)
        if result.failure_kind:
            reader.fail(result.failure_kind, result.reason)
        elif result.ended_s >= reader.lease_until_s:
            reader.fail("lease_expired", "the copy ended after the exporter's lease")
        self._ended(reader, piece, result.job.link, result.ended_s, result.copy_s, is_valid=not reader.is_over)
        self._settle(reader)

    # What the device's thread says of communicators.

    def nccl_event(self, now_s: float, event: NcclEvent) -> None:
        key: PeerKey = event.pair.peer
        if ended := self.nccl.event(now_s, key, event):
            reader, piece, peer = ended.reader, ended.piece, self._peers.get(key)
            if ended.reason and peer and not reader.is_over and piece.attempt == reader.attempt:
                peer.fetches[piece.piece_id] = (reader, piece, now_s)  # repeated as soon as there is a communicator
                if self._can_ask(peer):
                    self._fetch(peer, piece)
            else:
                is_valid = not ended.reason and not reader.is_over
                self._ended(reader, piece, "nccl", ended.ended_s, ended.copy_s, is_valid)
                self._settle(reader)
        self._follow_nccl(now_s)

    def _follow_nccl(self, now_s: float) -> None:
        """Do what follows from communicators that have come or gone."""
        for key in self.nccl.take_ready():
            if peer := self._peers.get(key):
                if peer.preparing == "nccl":
                    self._agreed(now_s, peer)
                for fetch_id, (reader, piece, _) in list(peer.fetches.items()):
                    peer.fetches[fetch_id] = (reader, piece, now_s)
                    self._fetch(peer, piece)
        for key, reason in self.nccl.take_given_up():
            if peer := self._peers.get(key):
                self._pass_over(now_s, peer, "nccl", reason)
        self.outbox += self.nccl.take_messages()

    # What to do next.

    def pump(self, now_s: float) -> None:
        """Ask for as many blocks as the credits allow, each transfer in its turn."""
        for peer in self._peers.values():
            wants_pair = peer.preparing == "nccl" or (peer.link == "nccl" and (peer.with_work or peer.fetches))
            if wants_pair and not self.nccl.pairs.is_ready(peer.key):
                self.nccl.pairs.want(now_s, peer.key)
            while self._can_ask(peer) and len(peer.fetches) < self._settings.fetch_window:
                max_bytes = (
                    self.nccl.pairs.staging_bytes(peer.key) if peer.link == "nccl" else self._settings.chunk_bytes
                )
                if not (work := self._next_piece([peer], max_bytes)):
                    break
                _, reader, piece = work
                peer.fetches[piece.piece_id] = (reader, piece, now_s)
                self._fetch(peer, piece)
        readable = [peer for peer in self._peers.values() if peer.link in READING_LINKS]
        while readable and len(self._copying) < _COPIES_AT_ONCE:
            max_bytes = self._settings.chunk_bytes * max(_COPY_CHUNKS[peer.link] for peer in readable)
            if not (work := self._next_piece(readable, max_bytes)):
                break
            peer, reader, piece = work
            readable = [*(other for other in readable if other is not peer), peer]
            self._copying[piece.piece_id] = reader
            self.copies.append(
                CopyJob(piece, peer.pid, peer.regions(piece), peer.key, peer.link, peer.target_regions(piece))
            )
        self.outbox += self.nccl.take_messages()

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
                if sent_s + stalled_s <= now_s:
                    self._fail(peer, reader.transfer_id, "transport", f"a fetch had no answer for {stalled_s:g} s")

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
            for transfer_id in list(peer.imports):
                self._fail(peer, transfer_id, "transport", f"the link {link} failed: {reason}")
        peer.passed_over[link] = reason
        peer.link = peer.preparing = ""
        peer.layers = ()
        if link == "nccl":
            self.nccl.pairs.forget(peer.key, reason)
        self.outbox += self.nccl.take_messages()  # before the exporter hears of another link
        self._greet(now_s, peer.key)

    def _refused(self, peer: ExporterPeer, refusal: str) -> None:
        peer.refusal = refusal
        peer.answer_until_s = math.inf
        log.warning("exporter_refused address=%s reason=%r", peer.key.address, refusal)
        self._fail_all(peer, "refused", refusal)

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
            reason = self._memory.why_unreadable(welcome.pid, welcome.regions[0].base_address)
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
            attached.fail(
                "mismatch",
                f"the exporter at {peer.key.address} is rank {peer.rank} of {peer.tp_size}, "
                f"named was rank {source.exporter_rank} of {source.exporter_tp}",
            )
            self._settle(attached)
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

    def _progress(self, now_s: float, peer: ExporterPeer, told: Import, message: Attached | Ready | Done) -> None:
        match message:
            case Attached(_, lease_until_s):
                told.lease_until_s = max(told.lease_until_s, lease_until_s)
            case Ready():
                if not all(map(peer.has_block, message.block_ids)):
                    raise BadFrame("ready with blocks that the exporter's cache has not")
                told.on_ready(message)
                peer.forget_fetches(told, before_attempt=told.attempt)
            case Done():
                told.on_done(message, now_s)
        peer.with_work[told.transfer_id] = told
        self._settle(told)

    def _arrived(self, now_s: float, peer: ExporterPeer, blocks: Blocks, payload: memoryview) -> None:
        if blocks.fetch_id not in peer.fetches:
            return  # of an attempt or a transfer that is over
        reader, piece, sent_s = peer.fetches[blocks.fetch_id]
        if blocks.num_bytes != piece.num_bytes or len(payload) != piece.num_bytes:
            raise BadFrame(f"blocks of {len(payload)} bytes, announced as {blocks.num_bytes}, asked {piece.num_bytes}")
        del peer.fetches[blocks.fetch_id]
        self._memory.scatter(piece, peer.target_regions(piece), payload)
        copy_s = now_s - max(sent_s, peer.last_blocks_s)
        peer.last_blocks_s = now_s
        self._ended(reader, piece, "zmq", now_s, copy_s, is_valid=True)
        self._settle(reader)

    def _ended(self, reader: Import, piece: Piece, link: str, now_s: float, copy_s: float, is_valid: bool) -> None:
        self.bytes_in[link] += piece.num_bytes if is_valid else 0
        self.copy_s[link] = self.copy_s.get(link, 0.0) + copy_s
        reader.piece_ended(piece, now_s, copy_s, is_valid)

    def _next_piece(self, peers: list[ExporterPeer], max_bytes: int) -> tuple[ExporterPeer, Import, Piece] | None:
        self._last_piece_id += 1
        return next_piece(peers, self._last_piece_id, max_bytes)

    def _fail(self, peer: ExporterPeer, transfer_id: str, kind: str, reason: str) -> None:
        if failed := peer.imports.get(transfer_id):
            failed.fail(kind, reason)
            self._settle(failed)

    def _fail_all(self, peer: ExporterPeer, kind: str, reason: str) -> None:
        """Nothing is sent to it any more, not even releases."""
        imports, peer.imports, peer.with_work = list(peer.imports.values()), {}, {}
        for failed in imports:
            del self._peer_of[failed]
            peer.forget_fetches(failed)
            failed.fail(kind, reason)
            self._settle(failed)

    def _lose(self, peer: ExporterPeer, reason: str) -> None:
        level = logging.WARNING if peer.imports else logging.INFO
        log.log(level, "exporter_lost address=%s epoch=%s reason=%r", peer.key.address, peer.key.epoch, reason)
        del self._peers[peer.key]
        self.outbox = [(key, message) for key, message in self.outbox if key != peer.key]
        self.mappings = [wanted for wanted in self.mappings if wanted.key != peer.key]
        self.lost.append(peer.key)
        self.nccl.pairs.forget(peer.key, reason)
        self._fail_all(peer, "peer_lost", f"exporter at {peer.key.address} lost: {reason}")

    def _settle(self, settled: Import) -> None:
        """Let go of exporters of which nothing is wanted, and close the import once all of it is over."""
        self._let_go(settled)
        transfer_id = settled.transfer_id
        whole = self._imports.get(transfer_id)
        if whole is None or settled not in whole.shards:
            return
        for other in whole.share_news(settled):
            self._let_go(other)
        if closed := whole.closing():
            del self._imports[transfer_id]
            self.closed.append(closed)
            if closed.failure_kind:
                self.failures[closed.failure_kind] += 1
            log.info(
                "import_closed transfer=%s outcome=%s kind=%s reason=%r link=%s bytes=%d done_to_loaded_s=%.4f",
                transfer_id, closed.outcome, closed.failure_kind, closed.reason, closed.link, closed.bytes_moved,
                closed.done_to_loaded_s,
            )  # fmt: skip

    def _let_go(self, settled: Import) -> None:
        """Release the exporter once nothing is wanted of it."""
        if peer := self._peer_of.get(settled):
            if settled.is_over:
                peer.forget_fetches(settled)
            if not settled.wants_exporter:
                del self._peer_of[settled], peer.imports[settled.transfer_id]
                peer.with_work.pop(settled.transfer_id, None)
                if peer.link:
                    self._tell(peer, Release(settled.transfer_id))
                else:
                    peer.abandoned.append(settled)

    def _can_ask(self, peer: ExporterPeer) -> bool:
        return peer.link == "zmq" or (peer.link == "nccl" and self.nccl.pairs.is_ready(peer.key))

    def _fetch_bytes(self, peer: ExporterPeer) -> int:
        return self.nccl.pairs.staging_bytes(peer.key) if peer.link == "nccl" else self._settings.chunk_bytes

    def _fetch(self, peer: ExporterPeer, piece: Piece) -> None:
        layers = (piece.first_layer, piece.num_layers)
        generation = self.nccl.pairs.generation(peer.key) if peer.link == "nccl" else 0
        block_ids = list(piece.source_ids)
        self._tell(peer, Fetch(piece.transfer_id, piece.attempt, piece.piece_id, *layers, block_ids, generation))

    def _tell(self, peer: ExporterPeer, message: FromImporter) -> None:
        self.outbox.append((peer.key, message))
