"""All imports of one rank: what the engine wants and exporters tell in, pieces to copy out. No sockets, no clock.

The exporters themselves are `ExporterLinks`' business. The endpoint's thread is the only caller.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.endpoint.copy_threads import NUM_THREADS, CopyJob, CopyResult
from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.importing.exporter_links import ExporterLinks
from kvtransfer.endpoint.importing.nccl_imports import EndedPiece
from kvtransfer.endpoint.peers import ExporterPeer, PeerKey, RankIdentity, next_piece
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheMap, Region
from kvtransfer.links.nccl_orders import NcclEvent
from kvtransfer.links.negotiation import READING_LINKS
from kvtransfer.messages import FAILURE_KINDS, Attached, Blocks, Checksums, Done, Failed, FromExporter, Ready
from kvtransfer.resharding.heads import ONLY_SOURCE, UnevenHeads
from kvtransfer.transfers.fetch_turns import FetchTurns
from kvtransfer.transfers.imports import ClosedImport, Import, Piece
from kvtransfer.transfers.sharded_import import ShardedImport, sources_of
from kvtransfer.verification.check_thread import CheckResult
from kvtransfer.verification.importer_side import ImportChecks

log = logging.getLogger("twinpool.kvtransfer")

_COPIES_AT_ONCE = 2 * NUM_THREADS
"""For each copy thread one being copied and one waiting, so that it never idles between them."""
_COPY_CHUNKS = {"host": 4, "cuda_ipc": 64}
"""A copy has no message to bound it; this many chunks keep cancelling quick (some ms) and transfers fair."""
_EARLY_TOKENS_KEPT = 1024


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
        self._memory = memory
        self._imports: dict[str, ShardedImport] = {}
        self._exporters = ExporterLinks(settings, cache, identity, memory.why_unreadable, self._fail)
        self._copying: dict[int, Import] = {}
        self._early_tokens: dict[str, int] = {}
        self._last_piece_id = 0
        self._turns = FetchTurns()
        self.outbox = self._exporters.outbox
        self.lost = self._exporters.lost
        self.mappings = self._exporters.mappings
        self.nccl = self._exporters.nccl
        self.checks = ImportChecks()
        self.copies: list[CopyJob] = []
        self.closed: list[ClosedImport] = []
        self.failures: Counter[str] = Counter()
        self.bytes_in: Counter[str] = Counter()
        self.copies_in: Counter[str] = Counter()
        self.copy_s: dict[str, float] = {}

    @property
    def num_open(self) -> int:
        return len(self._imports)

    @property
    def needs_sweep(self) -> bool:
        return self._exporters.needs_sweep

    def peers(self) -> dict[str, str]:
        """Per exporter's address: the link and why, or the refusal."""
        return self._exporters.described()

    # What the engine and the proxy say.

    def meet(self, now_s: float, exporters: Sequence[PeerKey]) -> None:
        """Get the links to those of a prefill worker's ranks ready that transfers will come from."""
        try:
            sources = sources_of(self._cache.layout, self._settings.rank, exporters)
        except UnevenHeads as error:
            log.warning("exporter_not_met reason=%r", str(error))
            return
        for source in sources:
            if source.num_heads:
                self._exporters.meet(now_s, exporters[source.exporter_rank])

    def open(
        self,
        now_s: float,
        transfer_id: str,
        exporters: Sequence[PeerKey],
        prompt_hash: bytes,
        num_tokens: int,
        wants_first_token: bool,
        priority: int = 0,
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
            verify = self._settings.verify
            shards.append(
                Import(transfer_id, layout, num_tokens, prompt_hash, wants_token, now_s, source, verify, priority)
            )
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
                self._exporters.join(now_s, exporters[opened.source.exporter_rank], opened)
        self._settle(shards[0])

    def place(self, now_s: float, transfer_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        if not (placed := self._imports.get(transfer_id)):
            log.warning("import_unknown transfer=%s verb=placed", transfer_id)
            return
        for shard in placed.shards:
            shard.place(first_block, block_ids, now_s)
            if peer := self._exporters.of(shard):
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

    # What exporters say, and what becomes of them.

    def receive(self, now_s: float, key: PeerKey, message: FromExporter, payload: memoryview | None) -> None:
        """Raises BadFrame for a message that no correct exporter sends."""
        peer = self._exporters.get(key)
        if peer is None:
            return
        if isinstance(message, Blocks) != (payload is not None):
            raise BadFrame(f"{type(message).__name__} {'without' if payload is None else 'with'} a payload")
        match message:
            case Blocks():
                self._arrived(now_s, peer, message, payload or memoryview(b""))
            case Checksums():
                if reader := self.checks.answered(now_s, key, message):
                    self._settle(reader)
            case Failed(transfer_id, kind, reason):
                if failed := peer.imports.get(transfer_id):
                    self._fail(failed, kind if kind in FAILURE_KINDS else "transport", reason)
            case Attached() | Ready() | Done():
                if told := peer.imports.get(message.transfer_id):
                    self._progress(now_s, peer, told, message)
            case _:
                self._exporters.receive(now_s, peer, message)

    def exporter_lost(self, key: PeerKey, reason: str) -> None:
        self._exporters.lose(key, reason)

    def mapped(self, now_s: float, key: PeerKey, layers: tuple[tuple[Region, ...], ...], reason: str) -> None:
        """The memory of an exporter is mapped, or cannot be for that reason."""
        self._exporters.mapped(now_s, key, layers, reason)

    # What the copy threads, the check thread and the device's thread say.

    def copied(self, result: CopyResult) -> None:
        piece = result.job.piece
        reader = self._copying.pop(piece.piece_id)
        if result.failure_kind:
            reader.fail(result.failure_kind, result.reason)
        elif result.ended_s >= reader.lease_until_s:
            reader.fail("lease_expired", "the copy ended after the exporter's lease")
        self._ended(reader, piece, result.job.link, result.ended_s, result.copy_s, is_valid=not reader.is_over)
        self._settle(reader)

    def checked(self, now_s: float, result: CheckResult) -> None:
        if reader := self.checks.computed(now_s, result):
            self._settle(reader)

    def nccl_event(self, now_s: float, event: NcclEvent) -> None:
        def on_ended(key: PeerKey, ended: EndedPiece) -> None:
            reader, piece, peer = ended.reader, ended.piece, self._exporters.get(key)
            if ended.reason and peer and not reader.is_over and piece.attempt == reader.attempt:
                self._exporters.fetch(now_s, peer, reader, piece)  # repeated as soon as there is a communicator
            else:
                is_valid = not ended.reason and not reader.is_over
                self._ended(reader, piece, "nccl", ended.ended_s, ended.copy_s, is_valid)
                self._settle(reader)

        self._exporters.nccl_event(now_s, event, on_ended)

    # What to do next.

    def pump(self, now_s: float) -> None:
        """Ask for as many blocks as the credits allow, each transfer in its turn."""
        exporters = self._exporters
        for peer in exporters:
            exporters.want_communicator(now_s, peer)
            while exporters.can_ask(peer) and len(peer.fetches) < self._settings.fetch_window:
                if not (work := self._next_piece([peer], exporters.fetch_bytes(peer))):
                    break
                exporters.fetch(now_s, *work)
        readable = [peer for peer in exporters if peer.link in READING_LINKS]
        while readable and len(self._copying) < _COPIES_AT_ONCE:
            max_bytes = self._settings.chunk_bytes * max(_COPY_CHUNKS[peer.link] for peer in readable)
            if not (work := self._next_piece(readable, max_bytes)):
                break
            peer, reader, piece = work
            self._copying[piece.piece_id] = reader
            self.copies.append(
                CopyJob(piece, peer.pid, peer.regions(piece), peer.key, peer.link, peer.target_regions(piece))
            )
        exporters.collect_nccl_messages()
        self.outbox += self.checks.pump(now_s)

    def sweep(self, now_s: float) -> None:
        self._exporters.sweep(now_s)
        stalled_s = self._settings.stalled_after_s
        for reader in self.checks.stalled(now_s, stalled_s):
            self._fail(reader, "transport", f"a check had no answer for {stalled_s:g} s")

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
        if is_valid:
            self.bytes_in[link] += piece.num_bytes
            self.copies_in[link] += 1
        self.copy_s[link] = self.copy_s.get(link, 0.0) + copy_s
        reader.piece_ended(piece, now_s, copy_s, is_valid)
        if piece.attempt < reader.attempt and (peer := self._exporters.of(reader)):
            peer.with_work[reader.transfer_id] = reader  # it may have waited for this

    def _next_piece(self, peers: list[ExporterPeer], max_bytes: int) -> tuple[ExporterPeer, Import, Piece] | None:
        self._last_piece_id += 1
        return next_piece(peers, self._turns, self._last_piece_id, max_bytes)

    def _fail(self, failed: Import, kind: str, reason: str) -> None:
        failed.fail(kind, reason)
        self._settle(failed)

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
        self._exporters.let_go(settled)
        self.checks.follow(settled, self._exporters.of(settled))
