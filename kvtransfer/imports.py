"""One transfer as its importer sees it: what to fetch next, what is here, when it is over. No I/O.

An import needs three things, in any order: the exporter's word (`Ready`, `Done`), a place for the blocks (`place`) and,
if it wants one, the first token. It closes once, after its place is known or it was cancelled, and never while a piece
is being written into its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.layout import CacheLayout
from kvtransfer.messages import Done, Ready


@dataclass(frozen=True)
class ClosedImport:
    """The end of an import; nothing writes into its blocks any more."""

    transfer_id: str
    outcome: str
    """`loaded`, `recompute` or `cancelled`."""
    first_token: int | None
    bad_block_ids: list[int]
    """The placed blocks that hold no valid data; empty when loaded."""
    failure_kind: str
    """One of `messages.FAILURE_KINDS`; empty when loaded."""
    reason: str
    link: str
    """Empty when none was agreed on."""
    bytes_moved: int
    num_tokens: int
    attached_to_done_s: float
    done_to_loaded_s: float
    copy_s: float


@dataclass(frozen=True)
class Piece:
    """Some blocks of some layers, on their way. `source_ids` are the exporter's, `target_ids` ours."""

    transfer_id: str
    piece_id: int
    attempt: int
    first_index: int
    """Of `target_ids[0]` among the placed blocks."""
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    first_layer: int
    num_layers: int
    num_bytes: int


class Import:
    def __init__(
        self,
        transfer_id: str,
        layout: CacheLayout,
        num_tokens: int,
        prompt_hash: bytes,
        wants_first_token: bool,
        opened_s: float,
    ) -> None:
        self.transfer_id = transfer_id
        self.num_tokens = num_tokens
        self.prompt_hash = prompt_hash
        self.wants_first_token = wants_first_token
        self.lease_until_s = 0.0
        self.in_flight: dict[int, Piece] = {}  # by piece id; being written into our blocks, or asked for
        self.is_cancelled = False
        self.link = ""
        self._layout = layout
        self._first_token: int | None = None
        self._failure: tuple[str, str] | None = None
        self.attempt = 0
        self._source_ids: list[int] = []  # the exporter's, one per KV block, in token order
        self._ready_tokens = 0
        self._done: Done | None = None
        self._first_block = 0
        self._target_ids: list[int] | None = None  # ours, from position `_first_block` on; None until placed
        self._is_orphaned = False  # the exporter gave up, or we gave up on it
        self._layers_missing: list[int] = []  # per placed block
        self._num_missing = 0  # their sum
        self._cursor = (0, 0)  # the next placed block and layer to ask for
        self._opened_s = opened_s
        self._done_s: float | None = None
        self._loaded_s: float | None = None
        self._bytes_moved = 0
        self._copy_s = 0.0

    # What the exporter says.

    def on_ready(self, message: Ready) -> None:
        if self._done or message.attempt < self.attempt:
            return
        if message.attempt > self.attempt:
            self._start_over(message.attempt)
        if message.first_block != len(self._source_ids) or message.num_tokens < self._ready_tokens:
            self.fail(
                "mismatch",
                f"the exporter named blocks from {message.first_block} with {message.num_tokens} tokens ready, "
                f"after {len(self._source_ids)} blocks with {self._ready_tokens}",
            )
            return
        self._source_ids += message.block_ids
        self._ready_tokens = message.num_tokens

    def on_done(self, message: Done, now_s: float) -> None:
        if self._done:
            return
        if message.attempt != self.attempt:
            self.fail("mismatch", f"the exporter ended attempt {message.attempt} during attempt {self.attempt}")
            return
        if message.num_tokens != self.num_tokens or message.prompt_hash != self.prompt_hash:
            self.fail(
                "mismatch",
                f"the exporter's prefill has {message.num_tokens} tokens and this request {self.num_tokens}, "
                "or their prompts differ",
            )
            return
        if len(self._source_ids) < self._num_blocks:
            self.fail("mismatch", f"the exporter named {len(self._source_ids)} of {self._num_blocks} blocks and ended")
            return
        self._done = message
        self._done_s = now_s
        if message.first_token is not None:
            self.give_first_token(message.first_token)
        self._note_if_loaded(now_s)

    # What the engine and the proxy say.

    def place(self, first_block: int, block_ids: Sequence[int], now_s: float) -> None:
        """Our blocks for the positions from `first_block` on. Those past the last prompt token take nothing."""
        if self._target_ids is not None:
            return
        self._first_block = first_block
        self._target_ids = list(block_ids)[: max(0, self._num_blocks - first_block)]
        self._void_copies()
        self._note_if_loaded(now_s)

    def give_first_token(self, token: int) -> None:
        if self._first_token is None:
            self._first_token = token

    def cancel(self) -> None:
        self.is_cancelled = True

    def fail(self, kind: str, reason: str) -> None:
        """The exporter is of no more use. That is no failure if all blocks are here."""
        self._is_orphaned = True
        if self._failure is None and not self.has_blocks:
            self._failure = (kind, reason)

    # What to do next.

    @property
    def is_placed(self) -> bool:
        return self._target_ids is not None

    @property
    def is_over(self) -> bool:
        """Nothing more is to be written into our blocks, whether or not they are complete."""
        return self.is_cancelled or self._is_orphaned

    @property
    def has_blocks(self) -> bool:
        """Every placed block holds the exporter's final data."""
        return self._loaded_s is not None

    @property
    def wants_exporter(self) -> bool:
        """The exporter still has something that we lack: its blocks must be held, its messages heard."""
        if self.is_over:
            return bool(self.in_flight)
        if self._target_ids == []:  # nothing to copy; `Done` may bring the token
            return self.wants_first_token and self._first_token is None and self._done is None
        return not self.has_blocks

    def next_piece(self, piece_id: int, max_bytes: int) -> Piece | None:
        """Blocks to copy next: complete at the exporter, lacking here; whole ones, unless one alone is too large."""
        index, layer = self._cursor
        if self._target_ids is None or self.is_over or index >= self._num_fetchable:
            return None
        layer_bytes = self._layout.layer_bytes
        if layer == 0 and self._layout.block_bytes <= max_bytes:
            end = min(index + max_bytes // self._layout.block_bytes, self._num_fetchable)
            num_layers, num_bytes = self._layout.num_layers, (end - index) * self._layout.block_bytes
            self._cursor = (end, 0)
        else:
            end, num_layers, num_bytes = index + 1, 1, layer_bytes[layer]
            while layer + num_layers < len(layer_bytes) and num_bytes + layer_bytes[layer + num_layers] <= max_bytes:
                num_bytes += layer_bytes[layer + num_layers]
                num_layers += 1
            is_last = layer + num_layers == len(layer_bytes)
            self._cursor = (end, 0) if is_last else (index, layer + num_layers)
        source_ids = self._source_ids[self._first_block + index : self._first_block + end]
        target_ids = self._target_ids[index:end]
        piece = Piece(
            self.transfer_id,
            piece_id,
            self.attempt,
            index,
            tuple(source_ids),
            tuple(target_ids),
            layer,
            num_layers,
            num_bytes,
        )
        self.in_flight[piece_id] = piece
        return piece

    def piece_ended(self, piece: Piece, now_s: float, copy_s: float, is_valid: bool = True) -> None:
        """The piece is no longer being written. `is_valid`: it holds what the exporter had in that attempt."""
        self.in_flight.pop(piece.piece_id, None)
        self._copy_s += copy_s
        if not is_valid:
            return
        self._bytes_moved += piece.num_bytes
        if piece.attempt == self.attempt:
            for index in range(piece.first_index, piece.first_index + len(piece.target_ids)):
                self._layers_missing[index] -= piece.num_layers
                self._num_missing -= piece.num_layers
            self._note_if_loaded(now_s)

    def closing(self) -> ClosedImport | None:
        """How it ended, or None while it has not."""
        if self.in_flight or not (self.is_placed or self.is_cancelled):
            return None
        if self.is_cancelled:
            return self._closed("cancelled")
        if self.wants_first_token and self._first_token is None:
            return None
        if self.has_blocks:
            return self._closed("loaded")
        return self._closed("recompute") if self._failure else None

    @property
    def _num_blocks(self) -> int:
        """KV blocks of the whole prompt."""
        return -(-self.num_tokens // self._layout.block_size)

    @property
    def _num_fetchable(self) -> int:
        """Placed blocks whose data the exporter will not change again, unless it starts over."""
        num_complete = self._num_blocks if self._done else self._ready_tokens // self._layout.block_size
        num_complete = min(num_complete, len(self._source_ids)) - self._first_block
        return min(num_complete, len(self._target_ids or ()))

    def _start_over(self, attempt: int) -> None:
        """The exporter was preempted: what it named is void, and so is what was copied."""
        self.attempt = attempt
        self._source_ids = []
        self._ready_tokens = 0
        self._done = None
        self._void_copies()

    def _void_copies(self) -> None:
        self._cursor = (0, 0)
        self._layers_missing = [self._layout.num_layers] * len(self._target_ids or ())
        self._num_missing = sum(self._layers_missing)

    def _note_if_loaded(self, now_s: float) -> None:
        """Data counts only once `Done` confirms its attempt: the exporter may be preempted while we copy."""
        is_complete = self._target_ids == [] or (self._done is not None and self.is_placed)
        if is_complete and not self._num_missing and not self._failure and self._loaded_s is None:
            self._loaded_s = now_s

    def _closed(self, outcome: str) -> ClosedImport:
        kind, reason = self._failure or ("", "")
        bad = []
        if not self.has_blocks:
            for block_id, missing in zip(self._target_ids or (), self._layers_missing, strict=True):
                if missing or self._done is None:
                    bad.append(block_id)
        done_s, loaded_s = self._done_s, self._loaded_s
        return ClosedImport(
            self.transfer_id,
            outcome,
            self._first_token if self.wants_first_token else None,
            bad,
            kind,
            reason,
            self.link,
            self._bytes_moved,
            self.num_tokens,
            attached_to_done_s=0.0 if done_s is None else done_s - self._opened_s,
            done_to_loaded_s=0.0 if done_s is None or loaded_s is None else max(0.0, loaded_s - done_s),
            copy_s=self._copy_s,
        )
