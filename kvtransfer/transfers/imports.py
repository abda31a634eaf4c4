"""One transfer as its importer sees it: what to fetch next, what is here, when it is over. No I/O.

An import needs three things, in any order: the exporter's word (`Ready`, `Done`), a place for the blocks (`place`) and,
if it wants one, the first token. It closes once, after its place is known or it was cancelled, and never while a piece
is being written into its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.layout import CacheLayout
from kvtransfer.messages import Done, Ready
from kvtransfer.resharding.heads import ONLY_SOURCE, Source
from kvtransfer.resharding.shares import Units
from kvtransfer.transfers.fetch_order import Computed, FetchOrder
from kvtransfer.verification.block_checks import BlockChecks, Comparison


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
    bytes_left_at_done: int = 0
    """What was not here yet when the exporter's `Done` came, and so could not hide behind its prefill."""


@dataclass(frozen=True)
class Piece:
    """Some blocks of some layers, on their way. `source_ids` are the exporter's, `target_ids` ours.

    Between ranks with other block sizes these are ids of units, see `resharding.shares`.
    """

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
        source: Source = ONLY_SOURCE,
        verify: str = "off",
        priority: int = 0,
    ) -> None:
        """`verify`: one of `VERIFY_MODES`; blocks count only when those that it names were compared.

        `priority`: lower is copied before others (`fetch_turns`).
        """
        self.transfer_id = transfer_id
        self.source = source
        self.num_tokens = num_tokens
        self.prompt_hash = prompt_hash
        self.wants_first_token = wants_first_token
        self.priority = priority
        self.last_turn = 0
        self.lease_until_s = 0.0
        self.in_flight: dict[int, Piece] = {}  # by piece id; being written into our blocks, or asked for
        self.is_cancelled = False
        self.link = ""
        self._units = Units(layout.block_size, layout.layer_bytes)
        self._checks = BlockChecks(verify, transfer_id)
        self._first_token: int | None = None
        self._failure: tuple[str, str] | None = None
        self.attempt = 0
        self._source_ids: list[int] = []  # the exporter's, one per unit, in token order
        self._ready_tokens = 0
        self._begun = (0, 0)  # tokens, those above among them, and how many of their first layers can be fetched
        self._done: Done | None = None
        self._placed: tuple[int, list[int]] | None = None  # as the engine said it, in blocks
        self._first_unit = 0
        self._target_ids: list[int] | None = None  # ours, from position `_first_unit` on; None until placed
        self._is_orphaned = False  # the exporter gave up, or we gave up on it
        self._layers_missing: list[int] = []  # per placed unit
        self._num_missing = 0  # their sum
        self._order = FetchOrder(0, ())  # of the placed units
        self._bytes_missing = 0
        self._bytes_left_at_done = 0
        self._opened_s = opened_s
        self._done_s: float | None = None
        self._loaded_s: float | None = None
        self._bytes_moved = 0
        self._copy_s = 0.0

    # What the exporter says.

    def agree(self, units: Units, now_s: float) -> None:
        """What it shares with us is counted in these units from here on. Comes before anything is copied."""
        self._units = units
        if self._placed is not None:
            self._aim(*self._placed, now_s)

    def on_ready(self, message: Ready) -> None:
        if self._done or message.attempt < self.attempt:
            return
        if message.attempt > self.attempt:
            self._start_over(message.attempt)
        per_block = self._units.exporter_per_block
        num_tokens, num_layers = message.num_tokens, message.num_layers
        known_tokens = max(self._ready_tokens, self._begun[0])
        if message.first_block * per_block != len(self._source_ids) or num_tokens < known_tokens:
            self.fail(
                "mismatch",
                f"the exporter named blocks from {message.first_block} with {num_tokens} tokens ready, "
                f"after {len(self._source_ids) // per_block} blocks with {known_tokens}",
            )
            return
        if num_layers is not None and not self._begun[1] <= num_layers <= self._units.num_layers:
            self.fail("mismatch", f"the exporter has {num_layers} layers ready, after {self._begun[1]} of this request")
            return
        self._source_ids += _units_of(message.block_ids, per_block)
        if num_layers is None:
            self._ready_tokens, self._begun = num_tokens, (0, 0)
        else:
            self._begun = (num_tokens, num_layers)

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
        if len(self._source_ids) < self._num_units:
            self.fail("mismatch", f"the exporter named {len(self._source_ids)} of {self._num_units} blocks and ended")
            return
        self._done = message
        self._done_s = now_s
        self._bytes_left_at_done = self._bytes_missing
        if message.first_token is not None:
            self.give_first_token(message.first_token)
        self._note_if_loaded(now_s)

    # What the engine and the proxy say.

    def place(self, first_block: int, block_ids: Sequence[int], now_s: float) -> None:
        """Our blocks for the positions from `first_block` on. Those past the last prompt token take nothing."""
        if self._target_ids is not None:
            return
        self._placed = (first_block, list(block_ids))
        self._aim(*self._placed, now_s)

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
    def first_token(self) -> int | None:
        return self._first_token

    @property
    def failure(self) -> tuple[str, str] | None:
        """Kind and reason; None as long as all goes well, or nothing is missing any more."""
        return self._failure

    @property
    def bytes_moved(self) -> int:
        return self._bytes_moved

    @property
    def copy_s(self) -> float:
        """Spent copying them."""
        return self._copy_s

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
        """What to copy next: computed at the exporter, lacking here; of whole blocks, unless one alone is too large or
        only some of its layers are computed."""
        if self._target_ids is None or self.is_over:
            return None
        if any(piece.attempt < self.attempt for piece in self.in_flight.values()):
            return None  # it writes into blocks that would be asked for again, and might end last
        if (portion := self._order.next(self._computed, max_bytes)) is None:
            return None
        piece = Piece(
            self.transfer_id,
            piece_id,
            self.attempt,
            portion.first,
            tuple(self._source_ids[self._first_unit + portion.first : self._first_unit + portion.end]),
            tuple(self._target_ids[portion.first : portion.end]),
            portion.first_layer,
            portion.num_layers,
            portion.num_bytes,
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
            self._bytes_missing -= piece.num_bytes
            for index in range(piece.first_index, piece.first_index + len(piece.target_ids)):
                self._layers_missing[index] -= piece.num_layers
                self._num_missing -= piece.num_layers
            self._note_if_loaded(now_s)

    @property
    def wants_check(self) -> bool:
        """All blocks are here, and some are to be compared with the exporter's next."""
        return self._checks.is_wanted and not self.is_over

    def next_check(self, max_bytes: int, max_blocks: int) -> Comparison:
        """What to compare next; at least one block."""
        indexes = self._checks.next(max(1, min(max_blocks, max_bytes // self._units.block_bytes)))
        targets = self._target_ids or []
        return Comparison(
            tuple(indexes),
            tuple(self._source_ids[self._first_unit + index] for index in indexes),
            tuple(targets[index] for index in indexes),
        )

    def compared(self, comparison: Comparison, theirs: Sequence[int], ours: Sequence[int], now_s: float) -> None:
        """The checksums of these blocks, there and here."""
        self._checks.compared(comparison.indexes, theirs, ours)
        bad = self._checks.first_bad
        if bad and self._checks.is_over:
            position = self._first_unit + bad.index
            self.fail(
                "checksum",
                f"block {position} of the prompt is not what the exporter has: checksum {bad.ours:08x} here and "
                f"{bad.theirs:08x} there",
            )
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
    def _num_units(self) -> int:
        """KV blocks of the whole prompt, in units."""
        return -(-self.num_tokens // self._units.block_size)

    @property
    def _computed(self) -> Computed:
        """What the exporter has of the placed units, and will not change again unless it starts over."""
        begun_tokens, num_layers = self._begun
        return Computed(self._num_placed_of(self._ready_tokens), self._num_placed_of(begun_tokens), num_layers)

    def _num_placed_of(self, num_tokens: int) -> int:
        """Placed units that are full, or end with the prompt, when so many tokens are computed."""
        is_whole = self._done is not None or num_tokens >= self.num_tokens
        num_units = self._num_units if is_whole else num_tokens // self._units.block_size
        return max(0, min(num_units, len(self._source_ids)) - self._first_unit)

    def _aim(self, first_block: int, block_ids: Sequence[int], now_s: float) -> None:
        per_block = self._units.importer_per_block
        self._first_unit = first_block * per_block
        self._target_ids = _units_of(block_ids, per_block)[: max(0, self._num_units - self._first_unit)]
        self._void_copies()
        if self._done:
            self._bytes_left_at_done = self._bytes_missing
        self._note_if_loaded(now_s)

    def _start_over(self, attempt: int) -> None:
        """The exporter was preempted: what it named is void, and so is what was copied."""
        self.attempt = attempt
        self._source_ids = []
        self._ready_tokens, self._begun = 0, (0, 0)
        self._done = None
        self._void_copies()

    def _void_copies(self) -> None:
        self._order = FetchOrder(len(self._target_ids or ()), self._units.layer_bytes)
        self._layers_missing = [self._units.num_layers] * len(self._target_ids or ())
        self._num_missing = sum(self._layers_missing)
        self._bytes_missing = self._units.block_bytes * len(self._layers_missing)

    def _note_if_loaded(self, now_s: float) -> None:
        """Data counts only once `Done` confirms its attempt: the exporter may be preempted while we copy. What is to be
        verified must have been, too.
        """
        is_complete = self._target_ids == [] or (self._done is not None and self.is_placed)
        if is_complete and not self._num_missing and not self._failure and self._loaded_s is None:
            self._checks.begin(len(self._target_ids or ()))
            if self._checks.is_over:
                self._loaded_s = now_s

    def _closed(self, outcome: str) -> ClosedImport:
        kind, reason = self._failure or ("", "")
        bad: dict[int, None] = {}
        if not self.has_blocks:
            units = zip(self._target_ids or (), self._layers_missing, strict=True)
            for index, (unit_id, missing) in enumerate(units):
                if missing or self._done is None or not self._checks.is_good(index):
                    bad[unit_id // self._units.importer_per_block] = None
        done_s, loaded_s = self._done_s, self._loaded_s
        return ClosedImport(
            self.transfer_id,
            outcome,
            self._first_token if self.wants_first_token else None,
            list(bad),
            kind,
            reason,
            self.link,
            self._bytes_moved,
            self.num_tokens,
            attached_to_done_s=0.0 if done_s is None else done_s - self._opened_s,
            done_to_loaded_s=0.0 if done_s is None or loaded_s is None else max(0.0, loaded_s - done_s),
            copy_s=self._copy_s,
            bytes_left_at_done=self._bytes_left_at_done,
        )


def _units_of(block_ids: Sequence[int], per_block: int) -> list[int]:
    """The units of these blocks, in token order."""
    if per_block == 1:
        return list(block_ids)
    return [block_id * per_block + unit for block_id in block_ids for unit in range(per_block)]
