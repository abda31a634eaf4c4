import pytest

from kvtransfer.messages import Done, Ready
from kvtransfer.transfers.imports import ClosedImport, Import
from kvtransfer.transfers.sharded_import import ShardedImport
from tests.unit.kvtransfer.transfers.test_imports import layout


def shards(number: int, wants_first_token: bool = True) -> list[Import]:
    made = [Import("t", layout(), 8, b"hash", wants_first_token, opened_s=0.0) for _ in range(number)]
    for shard in made:
        shard.place(0, [1, 2], 0.0)
    return made


def load(shard: Import, first_token: int | None = 5, num_pieces: int = 2, now_s: float = 1.0) -> None:
    shard.on_ready(Ready("t", 0, 0, [11, 12], 8))
    shard.on_done(Done("t", 0, 8, b"hash", first_token), now_s)
    for piece_id in range(num_pieces):
        piece = shard.next_piece(piece_id, max_bytes=300)  # one block
        assert piece is not None
        shard.piece_ended(piece, now_s + 1, copy_s=0.5)


def closed(whole: ShardedImport) -> ClosedImport:
    closing = whole.closing()
    assert closing is not None
    return closing


def test_it_closes_when_the_last_shard_has_what_it_needs() -> None:
    first, second = shards(2)
    whole = ShardedImport([first, second])
    load(first)
    assert whole.closing() is None
    load(second, now_s=3.0)
    closing = closed(whole)
    assert (closing.outcome, closing.bad_block_ids, closing.bytes_moved) == ("loaded", [], 2 * 2 * 300)
    assert (closing.attached_to_done_s, closing.done_to_loaded_s, closing.copy_s) == (3.0, 1.0, 2.0)


def test_the_token_that_one_shard_hears_is_known_to_all() -> None:
    first, second = shards(2)
    whole = ShardedImport([first, second])
    load(second, first_token=None)
    assert second.closing() is None
    load(first, first_token=9)
    assert whole.share_news(first) == [second]
    assert whole.share_news(first) == []
    assert closed(whole).first_token == 9


def test_a_failure_of_one_shard_ends_the_others_and_its_bad_blocks_are_those_of_all() -> None:
    first, second = shards(2, wants_first_token=False)
    whole = ShardedImport([first, second])
    load(first, num_pieces=1)
    load(second, num_pieces=0)
    second.fail("peer_lost", "it died")
    assert whole.share_news(second) == [first]
    closing = closed(whole)
    assert (closing.outcome, closing.failure_kind, closing.reason) == ("recompute", "peer_lost", "it died")
    assert sorted(closing.bad_block_ids) == [1, 2]


def test_what_failed_after_everything_was_here_is_no_failure() -> None:
    first, second = shards(2)
    whole = ShardedImport([first, second])
    load(first)
    load(second)
    second.fail("peer_lost", "it died")
    assert whole.share_news(second) == []
    assert closed(whole).outcome == "loaded"


def test_a_shard_that_is_still_being_written_keeps_the_whole_open() -> None:
    first, second = shards(2, wants_first_token=False)
    whole = ShardedImport([first, second])
    load(first)
    second.on_ready(Ready("t", 0, 0, [11, 12], 8))
    piece = second.next_piece(0, max_bytes=300)
    assert piece is not None
    for shard in whole.shards:
        shard.cancel()
    assert whole.closing() is None
    second.piece_ended(piece, 1.0, 0.0, is_valid=False)
    assert closed(whole).outcome == "cancelled"


@pytest.mark.parametrize("number", [1, 3])
def test_it_closes_as_its_worst_shard(number: int) -> None:
    made = shards(number, wants_first_token=False)
    for shard in made[:-1]:
        load(shard)
    made[-1].fail("aborted", "for a test")
    assert closed(ShardedImport(made)).outcome == "recompute"
