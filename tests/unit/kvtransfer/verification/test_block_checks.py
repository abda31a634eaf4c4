import random

import pytest

from kvtransfer.layout import CacheLayout
from kvtransfer.messages import Done, Ready
from kvtransfer.transfers.imports import Import
from kvtransfer.verification.block_checks import SAMPLE_EVERY, BlockChecks, sampled
from tests.unit.kvtransfer.rank_pair import BLOCK_SIZE, FACTS


def verdict(mode: str, bad: set[int], num_blocks: int = 40, at_once: int = 3) -> tuple[BlockChecks, list[int]]:
    """The checks of an import whose blocks `bad` differ, and the blocks that were compared."""
    checks = BlockChecks(mode, "some transfer")
    checks.begin(num_blocks)
    compared: list[int] = []
    while checks.is_wanted:
        indexes = checks.next(at_once)
        assert not checks.is_wanted
        assert not checks.is_over
        compared += indexes
        checks.compared(indexes, [1] * len(indexes), [2 if index in bad else 1 for index in indexes])
    assert checks.is_over
    return checks, compared


def test_off_compares_nothing_and_trusts_everything() -> None:
    checks, compared = verdict("off", bad={1})
    assert (compared, checks.first_bad) == ([], None)
    assert checks.is_good(1)


def test_all_compares_every_block_once() -> None:
    checks, compared = verdict("all", bad=set())
    assert compared == list(range(40))
    assert checks.first_bad is None


@pytest.mark.parametrize("num_blocks", [0, 1, 5, 8, 9, 40, 1000])
def test_a_sample_is_one_block_of_eight_and_the_last_and_the_same_every_time(num_blocks: int) -> None:
    chosen = sampled("some transfer", num_blocks)
    assert chosen == sampled("some transfer", num_blocks)
    assert num_blocks // SAMPLE_EVERY <= len(chosen) <= num_blocks // SAMPLE_EVERY + 2
    assert chosen[-1:] == list(range(num_blocks))[-1:]


def test_other_transfers_have_other_samples() -> None:
    assert {index for number in range(100) for index in sampled(f"transfer {number}", 40)} == set(range(40))


@pytest.mark.parametrize("mode", ["sample", "all"])
def test_the_first_bad_block_is_found_and_what_is_before_it_is_known_to_be_good(mode: str) -> None:
    chance = random.Random(3)
    for _ in range(200):
        num_blocks = chance.randrange(1, 60)
        bad = set(chance.sample(range(num_blocks), chance.randrange(num_blocks + 1)))
        if mode == "sample":
            bad |= {num_blocks - 1}  # always in the sample
        checks, compared = verdict(mode, bad, num_blocks, at_once=chance.randrange(1, 9))
        assert len(set(compared)) == len(compared)
        if not bad:
            assert checks.first_bad is None
            continue
        assert checks.first_bad
        assert checks.first_bad.index == min(bad)
        assert [index for index in range(num_blocks) if checks.is_good(index)] == list(range(min(bad)))


def test_what_was_not_compared_in_time_is_not_good() -> None:
    checks = BlockChecks("all", "t")
    checks.begin(4)
    checks.compared(checks.next(2), [1, 1], [1, 1])
    assert [checks.is_good(index) for index in range(4)] == [True, True, False, False]


def checked_import(layout: CacheLayout, verify: str = "all") -> Import:
    """With three blocks here, to be compared."""
    reader = Import("t", layout, 3 * BLOCK_SIZE, b"hash", False, 0.0, verify=verify)
    reader.place(0, [7, 8, 9], 0.0)
    reader.on_ready(Ready("t", 0, 0, [1, 2, 3], 3 * BLOCK_SIZE))
    piece = reader.next_piece(1, 1 << 20)
    assert piece
    reader.piece_ended(piece, 1.0, 0.1)
    reader.on_done(Done("t", 0, 3 * BLOCK_SIZE, b"hash", None), 2.0)
    return reader


@pytest.fixture
def layout() -> CacheLayout:
    layers = ("a", "b")
    return CacheLayout(FACTS, layers, ((2, 8),) * 2, ((0, 1),) * 2, ((32,),) * 2)


def test_an_import_is_loaded_only_when_its_blocks_were_compared(layout: CacheLayout) -> None:
    reader = checked_import(layout)
    assert reader.wants_exporter
    assert reader.closing() is None
    comparison = reader.next_check(1 << 20, 100)
    assert (comparison.source_ids, comparison.target_ids) == ((1, 2, 3), (7, 8, 9))
    assert not reader.wants_check
    reader.compared(comparison, [1, 2, 3], [1, 2, 3], 5.0)
    closed = reader.closing()
    assert closed
    assert (closed.outcome, closed.done_to_loaded_s) == ("loaded", 3.0)
    assert not reader.wants_exporter


def test_an_import_with_a_bad_block_is_computed_again_from_there_on(layout: CacheLayout) -> None:
    reader = checked_import(layout)
    reader.compared(reader.next_check(1 << 20, 100), [1, 0xABC, 3], [1, 0xDEF, 3], 5.0)
    closed = reader.closing()
    assert closed
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "checksum", [8, 9])
    assert closed.reason == (
        "block 1 of the prompt is not what the exporter has: checksum 00000def here and 00000abc there"
    )


def test_an_exporter_lost_before_the_comparison_leaves_no_good_block(layout: CacheLayout) -> None:
    reader = checked_import(layout)
    reader.fail("peer_lost", "for a test")
    assert not reader.wants_check
    closed = reader.closing()
    assert closed
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "peer_lost", [7, 8, 9])


def test_blocks_are_compared_some_at_a_time_and_one_at_least(layout: CacheLayout) -> None:
    reader = checked_import(layout)
    for block in (7, 8, 9):
        comparison = reader.next_check(1, 100)
        assert comparison.target_ids == (block,)
        reader.compared(comparison, [1], [1], 5.0)
    assert reader.has_blocks
