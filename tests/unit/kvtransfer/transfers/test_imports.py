from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import CacheLayout, ModelFacts
from kvtransfer.messages import Done, Ready
from kvtransfer.transfers.imports import ClosedImport, Import, Piece

BLOCK_SIZE = 4
LAYER_BYTES = 100
FACTS = ModelFacts("tiny", "bf16", "bf16", 1, 8, BLOCK_SIZE, "any", "any", 1)


def layout(num_layers: int = 3) -> CacheLayout:
    per_layer = ((LAYER_BYTES,),) * num_layers
    names = tuple(f"layer {i}" for i in range(num_layers))
    return CacheLayout(FACTS, names, per_layer, ((0,),) * num_layers, per_layer)


def an_import(num_tokens: int = 10, wants_first_token: bool = True, num_layers: int = 3) -> Import:
    return Import("t", layout(num_layers), num_tokens, b"hash", wants_first_token, opened_s=0.0)


def ready(block_ids: list[int], num_tokens: int, first_block: int = 0, attempt: int = 0) -> Ready:
    return Ready("t", attempt, first_block, block_ids, num_tokens)


def done(num_tokens: int = 10, attempt: int = 0, first_token: int | None = 5, prompt_hash: bytes = b"hash") -> Done:
    return Done("t", attempt, num_tokens, prompt_hash, first_token)


def pieces(transfer: Import, max_bytes: int = 1 << 20) -> list[Piece]:
    found: list[Piece] = []
    while piece := transfer.next_piece(len(found) + 1000 * transfer.attempt, max_bytes):
        found.append(piece)
    return found


def arrive(transfer: Import, max_bytes: int = 1 << 20) -> None:
    for piece in pieces(transfer, max_bytes):
        transfer.piece_ended(piece, now_s=1.0, copy_s=0.1)


def closed(transfer: Import) -> ClosedImport:
    closing = transfer.closing()
    assert closing is not None
    return closing


def still_wants_exporter(transfer: Import) -> bool:
    return transfer.wants_exporter


def test_blocks_are_fetched_when_they_are_full_or_end_with_the_prompt() -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 7))
    assert [piece.source_ids for piece in pieces(transfer)] == [(11,)]
    transfer.on_ready(ready([], 9, first_block=3))
    assert [piece.source_ids for piece in pieces(transfer)] == [(12,)]
    transfer.on_ready(ready([], 10, first_block=3))
    assert [(piece.source_ids, piece.target_ids) for piece in pieces(transfer)] == [((13,), (3,))]
    transfer.on_done(done(), 0.0)
    assert pieces(transfer) == []


def test_blocks_that_we_have_already_are_not_fetched() -> None:
    transfer = an_import()
    transfer.on_ready(ready([11, 12, 13], 10))
    transfer.on_done(done(), 0.0)
    transfer.place(2, [3], 0.0)
    assert [piece.source_ids for piece in pieces(transfer)] == [(13,)]


def test_what_is_left_to_copy_at_the_end_of_the_prefill_is_told() -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 9))
    arrive(transfer)
    transfer.on_ready(ready([], 10, first_block=3))
    transfer.on_done(done(), 0.0)
    arrive(transfer)
    assert closed(transfer).bytes_left_at_done == 3 * LAYER_BYTES, "the last block was not computed before"


def test_all_is_left_to_copy_where_the_place_was_not_known_before() -> None:
    transfer = an_import()
    transfer.on_ready(ready([11, 12, 13], 10))
    transfer.on_done(done(), 0.0)
    transfer.place(1, [2, 3], 0.0)
    arrive(transfer)
    assert closed(transfer).bytes_left_at_done == 2 * 3 * LAYER_BYTES


def test_what_a_preemption_made_void_is_left_to_copy_again() -> None:
    transfer = an_import(num_tokens=8)
    transfer.place(0, [1, 2], 0.0)
    transfer.on_ready(ready([11, 12], 8))
    arrive(transfer)
    transfer.on_ready(ready([13, 14], 8, attempt=1))
    transfer.on_done(done(8, attempt=1), 0.0)
    arrive(transfer)
    assert closed(transfer).bytes_left_at_done == 2 * 3 * LAYER_BYTES


def test_blocks_past_the_prompt_are_left_alone() -> None:
    transfer = an_import(num_tokens=8)
    transfer.place(1, [2, 3, 4], 0.0)
    transfer.on_ready(ready([11, 12, 13], 8))
    transfer.on_done(done(8), 0.0)
    arrive(transfer)
    assert closed(transfer).bytes_moved == 3 * LAYER_BYTES


@given(st.integers(1, 1200), st.integers(1, 7), st.integers(1, 30))
def test_pieces_cover_every_layer_of_every_block_once_and_are_bounded(
    max_bytes: int, num_layers: int, num_blocks: int
) -> None:
    transfer = an_import(num_tokens=num_blocks * BLOCK_SIZE, num_layers=num_layers)
    transfer.place(0, list(range(num_blocks)), 0.0)
    transfer.on_ready(ready(list(range(100, 100 + num_blocks)), num_blocks * BLOCK_SIZE))
    found = pieces(transfer, max_bytes)
    copied = [
        (block, layer)
        for piece in found
        for block in piece.target_ids
        for layer in range(piece.first_layer, piece.first_layer + piece.num_layers)
    ]
    assert sorted(copied) == [(block, layer) for block in range(num_blocks) for layer in range(num_layers)]
    assert all(piece.num_bytes <= max(max_bytes, LAYER_BYTES) for piece in found)
    assert all(piece.num_bytes == len(piece.target_ids) * piece.num_layers * LAYER_BYTES for piece in found)


def test_it_is_loaded_only_when_done_confirms_what_was_copied() -> None:
    transfer = an_import(num_tokens=8)
    transfer.place(0, [1, 2], 0.0)
    transfer.on_ready(ready([11, 12], 8))
    arrive(transfer)
    transfer.give_first_token(5)
    assert transfer.closing() is None
    transfer.on_done(done(8), 3.0)
    assert closed(transfer).outcome == "loaded"
    assert closed(transfer).attached_to_done_s == 3.0
    assert closed(transfer).done_to_loaded_s == 0.0


def test_a_restart_voids_what_was_copied_and_what_is_on_its_way() -> None:
    transfer = an_import(num_tokens=8)
    transfer.place(0, [1, 2], 0.0)
    transfer.on_ready(ready([11, 12], 8))
    first, second = pieces(transfer, max_bytes=3 * LAYER_BYTES)
    transfer.piece_ended(first, 0.0, 0.0)
    transfer.on_ready(ready([], 0, attempt=1))
    transfer.on_ready(ready([21, 22], 8, attempt=1))
    transfer.on_done(done(8, attempt=1), 0.0)
    assert transfer.closing() is None
    assert pieces(transfer) == [], "the old copy might end after the new one"
    transfer.piece_ended(second, 0.0, 0.0)
    assert transfer.closing() is None
    assert [piece.source_ids for piece in pieces(transfer)] == [(21, 22)]


def test_it_closes_only_when_nothing_is_being_written() -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 10))
    (piece,) = pieces(transfer)
    transfer.cancel()
    assert transfer.closing() is None
    assert still_wants_exporter(transfer)
    transfer.piece_ended(piece, 0.0, 0.0, is_valid=False)
    assert not still_wants_exporter(transfer)
    assert closed(transfer).outcome == "cancelled"


def test_a_failure_before_it_is_placed_waits_for_the_place_and_condemns_all_of_it() -> None:
    transfer = an_import(wants_first_token=False)
    transfer.fail("peer_lost", "gone")
    assert transfer.closing() is None
    transfer.place(1, [2, 3], 0.0)
    assert closed(transfer).outcome == "recompute"
    assert closed(transfer).bad_block_ids == [2, 3]
    assert closed(transfer).failure_kind == "peer_lost"


def test_a_failure_after_done_spares_the_blocks_that_are_here() -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 10))
    transfer.on_done(done(), 0.0)
    first, *others = pieces(transfer, max_bytes=3 * LAYER_BYTES)
    transfer.piece_ended(first, 0.0, 0.0)
    transfer.fail("peer_lost", "gone")
    for piece in others:
        transfer.piece_ended(piece, 0.0, 0.0, is_valid=False)
    assert closed(transfer).bad_block_ids == [2, 3]
    assert closed(transfer).first_token == 5


def test_a_failure_before_done_spares_nothing() -> None:
    """The exporter may have been preempted under the copy, and died before it could say so."""
    transfer = an_import(wants_first_token=False)
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12], 8))
    arrive(transfer)
    transfer.fail("peer_lost", "gone")
    assert closed(transfer).bad_block_ids == [1, 2, 3]


def test_a_failed_import_that_wants_a_token_stays_open_until_it_is_given() -> None:
    transfer = an_import()
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.fail("peer_lost", "gone")
    assert transfer.closing() is None
    transfer.give_first_token(9)
    assert (closed(transfer).outcome, closed(transfer).first_token) == ("recompute", 9)


def test_a_fully_cached_import_waits_for_nothing_but_the_token() -> None:
    transfer = an_import()
    transfer.place(3, [], 0.0)
    assert transfer.closing() is None
    assert still_wants_exporter(transfer)
    transfer.give_first_token(9)
    assert not still_wants_exporter(transfer)
    assert (closed(transfer).outcome, closed(transfer).bytes_moved) == ("loaded", 0)


def test_the_loss_of_the_exporter_is_no_failure_when_all_blocks_are_here() -> None:
    transfer = an_import()
    transfer.place(3, [], 0.0)
    transfer.fail("peer_lost", "gone")
    transfer.give_first_token(9)
    assert (closed(transfer).outcome, closed(transfer).failure_kind) == ("loaded", "")


def test_the_first_token_that_comes_is_kept() -> None:
    transfer = an_import(wants_first_token=True)
    transfer.give_first_token(1)
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 10))
    transfer.on_done(done(first_token=5), 0.0)
    arrive(transfer)
    assert closed(transfer).first_token == 1


def test_a_token_that_is_not_wanted_is_not_reported() -> None:
    transfer = an_import(wants_first_token=False)
    transfer.place(0, [1, 2, 3], 0.0)
    transfer.on_ready(ready([11, 12, 13], 10))
    transfer.on_done(done(first_token=5), 0.0)
    arrive(transfer)
    assert closed(transfer).first_token is None


def test_contradictions_of_the_exporter_are_mismatches() -> None:
    for message in (
        done(11),
        done(prompt_hash=b"other"),
        done(attempt=1),
        done(),  # no block was named
        ready([13], 10, first_block=2),
    ):
        transfer = an_import()
        transfer.place(0, [1, 2, 3], 0.0)
        if isinstance(message, Done):
            transfer.on_done(message, 0.0)
        else:
            transfer.on_ready(message)
        transfer.give_first_token(1)
        assert closed(transfer).failure_kind == "mismatch", message


EVENTS = st.sampled_from(
    ["place", "ready", "done", "restart", "piece", "end", "bad end", "token", "cancel", "fail"],
)


@given(st.lists(EVENTS, max_size=30), st.booleans(), st.integers(0, 3))
def test_whatever_happens_it_closes_once_and_only_when_quiet(
    events: list[str], wants_first_token: bool, first_block: int
) -> None:
    transfer = an_import(wants_first_token=wants_first_token)
    attempt, named = 0, 0
    flying: list[Piece] = []

    def check() -> bool:
        closing = transfer.closing()
        if closing is None:
            return False
        assert not flying, "closed while a piece is being written"
        assert closing.outcome in ("loaded", "recompute", "cancelled")
        if closing.outcome == "loaded":
            assert (closing.bad_block_ids, closing.failure_kind) == ([], "")
        if closing.outcome == "recompute" and first_block < 3:
            assert closing.bad_block_ids
        if wants_first_token and closing.outcome != "cancelled":
            assert closing.first_token is not None
        return True

    for number, event in enumerate(events):
        match event:
            case "place":
                transfer.place(first_block, list(range(first_block, 3)), float(number))
            case "ready" if named < 3:
                transfer.on_ready(ready([attempt * 10 + named], min(10, 4 * (named + 1)), named, attempt))
                named += 1
            case "done" if named == 3:
                transfer.on_done(done(attempt=attempt), float(number))
            case "restart":
                attempt, named = attempt + 1, 0
                transfer.on_ready(ready([], 0, attempt=attempt))
            case "piece":
                if piece := transfer.next_piece(number, 2 * LAYER_BYTES):
                    flying.append(piece)
            case "end" | "bad end" if flying:
                is_valid = event == "end" and not transfer.is_over
                transfer.piece_ended(flying.pop(0), float(number), 0.0, is_valid)
            case "token":
                transfer.give_first_token(3)
            case "cancel":
                transfer.cancel()
            case "fail":
                transfer.fail("transport", "for a test")
        if check():
            return
    transfer.cancel()
    while flying:
        transfer.piece_ended(flying.pop(), 99.0, 0.0, is_valid=False)
    assert check()
