"""The manifest of a transfer, prompt length and hash: whichever side looks, D never starts on another prompt's KV."""

from collections.abc import Callable

import pytest

from kvtransfer.connector.step_orders import hash_prompt
from kvtransfer.messages import Attach, Done
from kvtransfer.transfers.export import Export
from kvtransfer.transfers.imports import ClosedImport, Import
from tests.unit.kvtransfer.rank_pair import PROMPT_HASH, Cluster, Rank, eventually

Pair = tuple[Rank, Rank]
OTHER_HASH = hash_prompt([1, 2, 4])
OURS = [7, 8, 9]


@pytest.mark.parametrize("other", [[1, 2, 4], [1, 2], [1, 2, 3, 4], [3, 2, 1], [1, 2, 3 + (1 << 32)], []], ids=str)
def test_prompts_that_differ_have_different_hashes(other: list[int]) -> None:
    assert hash_prompt([1, 2, 3]) == hash_prompt((1, 2, 3))
    assert hash_prompt(other) != hash_prompt([1, 2, 3])


def test_the_same_prompt_with_another_adapter_has_another_hash() -> None:
    weights = ("", "7 poet /adapters/poet", "8 poet /adapters/poet/.", "9 poet " + "/long" * 100)
    assert len({hash_prompt([1, 2, 3], adapter) for adapter in weights}) == len(weights)


def is_refused(closed: ClosedImport) -> bool:
    """Nothing of the exporter's is used: not a block, not its token."""
    return (closed.outcome, closed.failure_kind, closed.bad_block_ids, closed.first_token) == (
        "recompute", "mismatch", OURS, None,
    )  # fmt: skip


def early(exporter: Rank, importer: Rank) -> None:
    exporter.export("t", [1, 2, 3], 12)
    importer.import_("t", exporter, OURS, 12, wants_first_token=False, prompt_hash=OTHER_HASH)


def waiting(exporter: Rank, importer: Rank) -> None:
    importer.import_("t", exporter, OURS, 12, wants_first_token=False, prompt_hash=OTHER_HASH)
    eventually(lambda: exporter.endpoint._loop.exporter._waiting)
    exporter.export("t", [1, 2, 3], 12)


@pytest.mark.parametrize("meet", [early, waiting])
def test_the_exporter_refuses_an_importer_with_another_prompt(pair: Pair, meet: Callable[[Rank, Rank], None]) -> None:
    exporter, importer = pair
    meet(exporter, importer)
    closed = importer.closed_import()
    assert is_refused(closed)
    assert closed.reason == "the prompts of importer and exporter differ, though their lengths are equal"
    assert closed.bytes_moved == 0


def test_the_importer_refuses_an_exporter_with_another_prompt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that does not look: its blocks come, and are not used."""
    exporter, importer = pair
    monkeypatch.setattr(Export, "mismatch", lambda self, attach: "")
    early(exporter, importer)
    closed = importer.closed_import()
    assert is_refused(closed)
    assert "or their prompts differ" in closed.reason
    assert exporter.closed_export().outcome == "released"


def test_the_token_of_another_prompt_is_not_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = pair
    monkeypatch.setattr(Export, "mismatch", lambda self, attach: "")
    exporter.export("t", [1, 2, 3], 12, first_token=7)
    importer.import_("t", exporter, OURS, 12, prompt_hash=OTHER_HASH)
    eventually(lambda: exporter.has_closed(0.1))
    assert not importer.has_closed(0.05), "it waits for the token of its own prompt, which the proxy has"
    importer.endpoint.give_first_token("t", 12)
    closed = importer.closed_import()
    assert (closed.outcome, closed.bad_block_ids, closed.first_token) == ("recompute", OURS, 12)


def test_with_everything_cached_the_token_of_another_prompt_is_not_taken_either(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = pair
    monkeypatch.setattr(Export, "mismatch", lambda self, attach: "")
    exporter.export("t", [1, 2, 3], 12, first_token=7)
    importer.import_("t", exporter, [], 12, first_block=3, prompt_hash=OTHER_HASH)
    eventually(lambda: exporter.has_closed(0.1))
    assert not importer.has_closed(0.05)
    importer.endpoint.give_first_token("t", 12)
    assert (importer.closed_import().first_token, importer.closed_import().bytes_moved) == (12, 0)


def test_every_rank_of_an_exporter_is_asked_about_its_prompt(cluster: Cluster) -> None:
    """Also one that shares nothing else with the importer."""
    export = Export("t", PROMPT_HASH, 12, 0.0)
    assert export.mismatch(Attach("t", "us", 12, PROMPT_HASH, True)) == ""
    assert "differ" in export.mismatch(Attach("t", "us", 12, OTHER_HASH, True))
    assert "expects 11" in export.mismatch(Attach("t", "us", 11, PROMPT_HASH, True))


@pytest.mark.parametrize(
    "done",
    [Done("t", 0, 12, OTHER_HASH, 7), Done("t", 0, 11, PROMPT_HASH, 7), Done("t", 1, 12, PROMPT_HASH, 7)],
    ids=["prompt", "length", "attempt"],
)
def test_blocks_that_are_here_do_not_count_after_a_done_of_something_else(cluster: Cluster, done: Done) -> None:
    reader = Import("t", cluster.rank().map.layout, 12, PROMPT_HASH, False, 0.0)
    reader.place(0, OURS, 0.0)
    export = Export("t", PROMPT_HASH, 12, 0.0)
    for ready in export.announce([1, 2, 3], 12):
        reader.on_ready(ready)  # type: ignore[arg-type]
    piece = reader.next_piece(1, 1 << 20)
    assert piece
    reader.piece_ended(piece, 0.0, 0.0)
    reader.on_done(done, 0.0)
    closed = reader.closing()
    assert closed
    assert is_refused(closed)
