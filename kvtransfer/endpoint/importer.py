"""All imports of one rank and the exporters they come from: messages in, messages and copies out. No sockets, no clock.

The endpoint's thread is the only caller.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.endpoint.copy_thread import CopyJob, CopyResult
from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.peers import ExporterPeer, PeerKey, RankIdentity, next_piece, regions_of
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.imports import ClosedImport, Import, Piece
from kvtransfer.layout import CacheMap
from kvtransfer.messages import (
    FAILURE_KINDS,
    Attach,
    Attached,
    Beat,
    BeatAck,
    Blocks,
    Done,
    Failed,
    Fetch,
    FromExporter,
    FromImporter,
    Hello,
    Ready,
    Refused,
    Release,
    Welcome,
)

log = logging.getLogger("twinpool.kvtransfer")

_COPIES_AT_ONCE = 2
"""One being copied and one waiting, so that the copy thread never idles between them."""
_COPY_CHUNKS = 16
"""A copy has no message to bound it; this many chunks keep cancelling quick and transfers fair."""
_EARLY_TOKENS_KEPT = 1024


class Memory(Protocol):
    """What the importer has done to memory at once."""

    def why_unreadable(self, pid: int, address: int) -> str:
        """Why this process cannot read that one; empty when it can."""

    def scatter(self, piece: Piece, payload: memoryview) -> None:
        """Write the bytes of `piece` into our blocks. Raises ValueError when their number is wrong."""


class Importer:
    def __init__(self, settings: EndpointSettings, cache: CacheMap, identity: RankIdentity, memory: Memory) -> None:
        self._settings = settings
        self._cache = cache
        self._identity = identity
        self._memory = memory
        self._imports: dict[str, Import] = {}
        self._peers: dict[PeerKey, ExporterPeer] = {}
        self._peer_of: dict[str, ExporterPeer] = {}  # by transfer, while the import wants something of it
        self._copying: dict[int, Import] = {}
        self._early_tokens: dict[str, int] = {}
        self._last_piece_id = 0
        self.outbox: list[tuple[PeerKey, FromImporter]] = []
        self.lost: list[PeerKey] = []
        self.copies: list[CopyJob] = []
        self.closed: list[ClosedImport] = []
        self.failures: Counter[str] = Counter()
        self.bytes_in: Counter[str] = Counter()
        self.copy_s: dict[str, float] = {}

    @property
    def num_open(self) -> int:
        return len(self._imports)

    @property
    def needs_sweep(self) -> bool:
        return any(peer.imports or peer.answer_until_s < math.inf for peer in self._peers.values())

    def peers(self) -> dict[str, str]:
        """Per address: the link and why, or the refusal."""
        return {
            peer.key.address: f"refused: {peer.refusal}" if peer.refusal else f"{peer.link}: {peer.why}"
            for peer in self._peers.values()
            if peer.refusal or peer.link
        }

    # What the engine and the proxy say.

    def open(
        self,
        now_s: float,
        transfer_id: str,
        key: PeerKey,
        prompt_hash: bytes,
        num_tokens: int,
        wants_first_token: bool,
    ) -> None:
        if transfer_id in self._imports:
            log.warning("import_opened_twice transfer=%s", transfer_id)
            return
        opened = Import(transfer_id, self._cache.layout, num_tokens, prompt_hash, wants_first_token, now_s)
        self._imports[transfer_id] = opened
        early_token = self._early_tokens.pop(transfer_id, None)
        if early_token is not None:
            opened.give_first_token(early_token)
        peer = self._peers.get(key) or self._greet(now_s, key, list(self._settings.links))
        if peer.refusal:
            opened.fail("refused", peer.refusal)
            self._settle(opened)
            return
        peer.imports[transfer_id] = opened
        self._peer_of[transfer_id] = peer
        if peer.link:
            self._attach(now_s, peer, opened)

    def place(self, now_s: float, transfer_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        if not (placed := self._imports.get(transfer_id)):
            log.warning("import_unknown transfer=%s verb=placed", transfer_id)
            return
        placed.place(first_block, block_ids, now_s)
        if peer := self._peer_of.get(transfer_id):
            peer.with_work[transfer_id] = placed
        self._settle(placed)

    def give_first_token(self, now_s: float, transfer_id: str, token: int) -> None:
        if known := self._imports.get(transfer_id):
            known.give_first_token(token)
            self._settle(known)
            return
        self._early_tokens[transfer_id] = token  # the proxy may be faster than our own engine
        if len(self._early_tokens) > _EARLY_TOKENS_KEPT:
            del self._early_tokens[next(iter(self._early_tokens))]

    def cancel(self, now_s: float, transfer_id: str) -> None:
        if cancelled := self._imports.get(transfer_id):
            cancelled.cancel()
            self._settle(cancelled)

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
                peer.refusal = f"{reason} (differing: {', '.join(differing_fields) or 'unknown'})"
                peer.answer_until_s = math.inf
                log.warning("exporter_refused address=%s reason=%r", key.address, peer.refusal)
                self._fail_all(peer, "refused", peer.refusal)
            case BeatAck(lease_until_s, transfer_ids, unknown_ids):
                peer.answer_until_s = math.inf
                for transfer_id in transfer_ids:
                    if held := peer.imports.get(transfer_id):
                        held.lease_until_s = max(held.lease_until_s, lease_until_s)
                for transfer_id in unknown_ids:
                    self._fail(peer, transfer_id, "unknown_transfer", "the exporter holds this transfer no more")
            case Blocks():
                self._arrived(now_s, peer, message, payload or memoryview(b""))
            case Failed(transfer_id, kind, reason):
                self._fail(peer, transfer_id, kind if kind in FAILURE_KINDS else "transport", reason)
            case Attached() | Ready() | Done():
                if told := peer.imports.get(message.transfer_id):
                    self._progress(now_s, peer, told, message)

    def exporter_lost(self, key: PeerKey, reason: str) -> None:
        if peer := self._peers.get(key):
            self._lose(peer, reason)

    # What the copy thread says.

    def copied(self, result: CopyResult) -> None:
        piece = result.job.piece
        reader = self._copying.pop(piece.piece_id)
        if result.failure_kind:
            reader.fail(result.failure_kind, result.reason)
        elif result.ended_s >= reader.lease_until_s:
            reader.fail("lease_expired", "the copy ended after the exporter's lease")
        self._ended(reader, piece, "host", result.ended_s, result.copy_s, is_valid=not reader.is_over)
        self._settle(reader)

    # What to do next.

    def pump(self, now_s: float) -> None:
        """Ask for as many blocks as the credits allow, each transfer in its turn."""
        for peer in self._peers.values():
            while peer.link == "zmq" and len(peer.fetches) < self._settings.fetch_window:
                if not (work := self._next_piece([peer], self._settings.chunk_bytes)):
                    break
                _, reader, piece = work
                peer.fetches[piece.piece_id] = (reader, piece, now_s)
                layers = (piece.first_layer, piece.num_layers)
                fetch = Fetch(piece.transfer_id, piece.attempt, piece.piece_id, *layers, list(piece.source_ids))
                self._tell(peer, fetch)
        readable = [peer for peer in self._peers.values() if peer.link == "host"]
        while readable and len(self._copying) < _COPIES_AT_ONCE:
            if not (work := self._next_piece(readable, self._settings.chunk_bytes * _COPY_CHUNKS)):
                break
            peer, reader, piece = work
            readable = [*(other for other in readable if other is not peer), peer]
            self._copying[piece.piece_id] = reader
            self.copies.append(CopyJob(piece, peer.pid, peer.regions(piece)))

    def sweep(self, now_s: float) -> None:
        for peer in list(self._peers.values()):
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

    def _greet(self, now_s: float, key: PeerKey, links: list[str]) -> ExporterPeer:
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = ExporterPeer(key, links, math.inf, now_s + self._settings.beat_s)
        peer.links = links
        peer.answer_until_s = now_s + self._settings.peer_lost_after_s
        layout, mine = self._cache.layout, self._identity
        rank, fingerprint = self._settings.rank, layout.fingerprint()
        hello = Hello(
            mine.epoch, rank, fingerprint, layout.fields(), mine.host_id, links, exporter_epoch=key.epoch, pid=mine.pid
        )
        self._tell(peer, hello)
        return peer

    def _welcomed(self, now_s: float, peer: ExporterPeer, welcome: Welcome) -> None:
        if welcome.epoch != peer.key.epoch or welcome.link not in peer.links:
            raise BadFrame(f"welcome of epoch {welcome.epoch} with link {welcome.link!r}: neither was asked for")
        if welcome.link == "host":
            peer.layers = regions_of(welcome.regions, self._cache.layout)
            reason = self._memory.why_unreadable(welcome.pid, welcome.regions[0].base_address)
            if reason:
                log.warning("host_link_unusable address=%s reason=%r", peer.key.address, reason)
                peer.layers = ()
                peer.why = f"; not host: {reason}"
                self._greet(now_s, peer.key, [link for link in peer.links if link != "host"])
                return
        peer.answer_until_s = math.inf
        peer.link, peer.why, peer.pid = welcome.link, welcome.why + peer.why, welcome.pid
        log.info("exporter_welcomed_us address=%s link=%s why=%r", peer.key.address, peer.link, peer.why)
        for waiting in peer.imports.values():
            self._attach(now_s, peer, waiting)
        for given_up in peer.abandoned:
            self._attach(now_s, peer, given_up)
            self._tell(peer, Release(given_up.transfer_id))
        peer.abandoned.clear()

    def _attach(self, now_s: float, peer: ExporterPeer, attached: Import) -> None:
        if len(peer.imports) == 1:
            peer.next_beat_s = now_s + self._settings.beat_s
        attached.link = peer.link
        wants_first_token = attached.wants_first_token
        attach = Attach(
            attached.transfer_id, peer.key.epoch, attached.num_tokens, attached.prompt_hash, wants_first_token
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
        self._memory.scatter(piece, payload)
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
            del self._peer_of[failed.transfer_id]
            peer.forget_fetches(failed)
            failed.fail(kind, reason)
            self._settle(failed)

    def _lose(self, peer: ExporterPeer, reason: str) -> None:
        level = logging.WARNING if peer.imports else logging.INFO
        log.log(level, "exporter_lost address=%s epoch=%s reason=%r", peer.key.address, peer.key.epoch, reason)
        del self._peers[peer.key]
        self.outbox = [(key, message) for key, message in self.outbox if key != peer.key]
        self.lost.append(peer.key)
        self._fail_all(peer, "peer_lost", f"exporter at {peer.key.address} lost: {reason}")

    def _settle(self, settled: Import) -> None:
        """Release the exporter once nothing is wanted of it, and close the import once it is over."""
        transfer_id = settled.transfer_id
        if peer := self._peer_of.get(transfer_id):
            if settled.is_over:
                peer.forget_fetches(settled)
            if not settled.wants_exporter:
                del self._peer_of[transfer_id], peer.imports[transfer_id]
                peer.with_work.pop(transfer_id, None)
                if peer.link:
                    self._tell(peer, Release(transfer_id))
                else:
                    peer.abandoned.append(settled)
        if transfer_id in self._imports and (closed := settled.closing()):
            del self._imports[transfer_id]
            self.closed.append(closed)
            if closed.failure_kind:
                self.failures[closed.failure_kind] += 1
            log.info(
                "import_closed transfer=%s outcome=%s kind=%s reason=%r link=%s bytes=%d done_to_loaded_s=%.4f",
                transfer_id, closed.outcome, closed.failure_kind, closed.reason, closed.link, closed.bytes_moved,
                closed.done_to_loaded_s,
            )  # fmt: skip

    def _tell(self, peer: ExporterPeer, message: FromImporter) -> None:
        self.outbox.append((peer.key, message))
