"""An `Import` whose exporter announces layers of a chunk before all of them are computed."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.messages import Done, Ready
from kvtransfer.resharding.shares import Units
from kvtransfer.transfers.imports import ClosedImport, Import, Piece
from tests.unit.kvtransfer.transfers.test_imports import LAYER_BYTES, an_import, arrive, done, pieces

UNIT = 2  # tokens


def ready(block_ids: list[int], num_tokens: int, num_layers: int | None, first_block: int = 0) -> Ready:
    return Ready("t", 0, first_block, block_ids, num_tokens, num_layers)


def layers(found: list[Piece]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(piece.source_ids, piece.first_layer, piece.num_layers) for piece in found]


def test_only_the_last_group_is_left_when_the_prompt_ends() -> None:
    transfer = an_import()  # 10 tokens in blocks of 4, 3 layers
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11], 4, None))
    assert layers(pieces(transfer)) == [((11,), 0, 3)]
    transfer.on_ready(ready([12, 13], 10, 1, first_block=1))
    assert layers(pieces(transfer)) == [((12, 13), 0, 1)], "the last block too, which is not full"
    transfer.on_ready(ready([], 10, 2, first_block=3))
    assert layers(pieces(transfer)) == [((12, 13), 1, 1)]
    transfer.on_done(done(), 0.0)
    assert layers(pieces(transfer)) == [((12, 13), 2, 1)]


def test_a_block_that_the_chunk_leaves_unfinished_is_not_fetched() -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12], 7, 2))
    assert layers(pieces(transfer)) == [((11,), 0, 2)]


def test_layers_are_no_substitute_for_done() -> None:
    transfer = an_import(num_tokens=8)
    transfer.place(0, [1, 2], 0.0)
    transfer.on_ready(ready([11, 12], 8, 3))
    arrive(transfer)
    transfer.give_first_token(5)
    assert transfer.closing() is None
    transfer.fail("peer_lost", "gone")
    closed = transfer.closing()
    assert closed
    assert (closed.outcome, closed.bad_block_ids) == ("recompute", [1, 2])


def test_a_restart_voids_the_layers_that_were_copied() -> None:
    transfer = an_import(num_tokens=8)
    transfer.place(0, [1, 2], 0.0)
    transfer.on_ready(ready([11, 12], 8, 2))
    arrive(transfer)
    transfer.on_ready(Ready("t", 1, 0, [], 0))
    assert pieces(transfer) == []
    transfer.on_ready(Ready("t", 1, 0, [21, 22], 8, 1))
    assert layers(pieces(transfer)) == [((21, 22), 0, 1)]


@pytest.mark.parametrize(
    "contradiction",
    [ready([], 10, 4, 3), ready([], 10, 1, 3), ready([], 10, -1, 3), ready([], 9, 2, 3), ready([], 9, None, 3)],
    ids=["more layers than there are", "fewer layers", "less than none", "fewer tokens", "fewer tokens of all layers"],
)
def test_what_was_announced_is_not_taken_back_without_a_restart(contradiction: Ready) -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 10, 2))
    transfer.on_ready(contradiction)
    assert transfer.failure
    assert transfer.failure[0] == "mismatch"


@dataclass
class Prefill:
    """An exporter that announces chunks, some of them layer by layer, and starts over now and then."""

    chance: random.Random
    num_tokens: int
    num_layers: int
    tokens_per_block: int
    attempt: int = 0
    num_named: int = 0
    num_complete: int = 0  # tokens
    num_begun: int = 0
    num_layers_begun: int = 0
    is_done: bool = False

    def step(self) -> Ready | Done:
        if self.attempt < 3 and self.chance.random() < 0.1:
            self.attempt += 1
            self.num_named = self.num_complete = self.num_begun = self.num_layers_begun = 0
            return Ready("t", self.attempt, 0, [], 0)
        if self.num_complete == self.num_tokens:
            self.is_done = True
            return Done("t", self.attempt, self.num_tokens, b"hash", 5)
        if not self.num_begun:
            self.num_begun = self.chance.randint(self.num_complete + 1, self.num_tokens)
        if self.num_layers_begun < self.num_layers and self.chance.random() < 0.7:
            self.num_layers_begun = self.chance.randint(self.num_layers_begun + 1, self.num_layers)
            return self._ready(self.num_begun, self.num_layers_begun)
        self.num_complete, self.num_begun, self.num_layers_begun = self.num_begun, 0, 0
        return self._ready(self.num_complete, None)

    def _ready(self, num_tokens: int, num_layers: int | None) -> Ready:
        first, self.num_named = self.num_named, -(-num_tokens // self.tokens_per_block)
        block_ids = [100 * (self.attempt + 1) + block for block in range(first, self.num_named)]
        return Ready("t", self.attempt, first, block_ids, num_tokens, num_layers)

    def has_computed(self, unit: int, layer: int) -> bool:
        end = min(self.num_tokens, (unit + 1) * UNIT)
        return self.num_complete >= end or (self.num_begun >= end and layer < self.num_layers_begun)


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_in_any_order_every_layer_of_every_block_is_fetched_once_per_attempt_and_not_before_it_is_computed(
    chance: random.Random,
) -> None:
    num_tokens, num_layers = chance.randint(1, 20), chance.randint(1, 5)
    per_block, our_per_block = chance.choice([(1, 1), (2, 1), (1, 2)])
    transfer = an_import(num_tokens, num_layers=num_layers)
    transfer.agree(Units(UNIT, (LAYER_BYTES,) * num_layers, per_block, our_per_block), 0.0)
    num_units = -(-num_tokens // UNIT)
    num_ours = -(-num_units // our_per_block)
    first_block = chance.randint(0, num_ours)  # the blocks before are cached here
    prefill = Prefill(chance, num_tokens, num_layers, UNIT * per_block)
    fetched: set[tuple[int, int]] = set()
    flying: list[Piece] = []
    attempt = piece_id = 0
    is_placed = False

    def place() -> None:
        transfer.place(first_block, list(range(first_block, num_ours)), 0.0)

    def fetch() -> bool:
        nonlocal piece_id
        piece_id += 1
        piece = transfer.next_piece(piece_id, chance.randint(1, 12 * LAYER_BYTES))
        if piece is None:
            return False
        flying.append(piece)
        assert piece.attempt == prefill.attempt
        assert piece.num_bytes == len(piece.target_ids) * piece.num_layers * LAYER_BYTES
        for target, source in zip(piece.target_ids, piece.source_ids, strict=True):
            assert source == 100 * per_block * (prefill.attempt + 1) + target, "the same place in the prompt"
            for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
                assert prefill.has_computed(target, layer)
                assert (target, layer) not in fetched
                fetched.add((target, layer))
        return True

    def land() -> None:
        transfer.piece_ended(flying.pop(chance.randrange(len(flying))), 1.0, 0.0)

    while not prefill.is_done:
        message = prefill.step()
        if isinstance(message, Done):
            transfer.on_done(message, 0.0)
        else:
            transfer.on_ready(message)
        if prefill.attempt > attempt:
            attempt = prefill.attempt
            fetched.clear()
        if not is_placed and chance.random() < 0.2:
            is_placed = True
            place()
        for _ in range(chance.randrange(4)):
            if not fetch() and flying:
                land()
    place()
    while fetch() or flying:
        if flying and chance.random() < 0.5:
            land()
    expected = {(unit, layer) for unit in range(first_block * our_per_block, num_units) for layer in range(num_layers)}
    assert fetched == expected
    assert closed(transfer).outcome == "loaded"
    assert closed(transfer).bytes_moved >= len(expected) * LAYER_BYTES


def closed(transfer: Import) -> ClosedImport:
    closing = transfer.closing()
    assert closing is not None
    return closing
