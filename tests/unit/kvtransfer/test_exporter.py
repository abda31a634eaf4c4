"""The exporter's decisions without sockets or clock."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvtransfer.endpoint.exporting.exporter import Exporter
from kvtransfer.endpoint.frames import BadFrame, encode, from_importer
from kvtransfer.endpoint.peers import RankIdentity
from kvtransfer.layout import probe
from kvtransfer.messages import (
    Attach,
    Beat,
    BeatAck,
    Blocks,
    Failed,
    Fetch,
    FromExporter,
    Hello,
    Ready,
    Refused,
    Release,
    Welcome,
)
from tests.unit.kvtransfer.rank_pair import FACTS, NUM_BLOCKS, NUM_LAYERS, PROMPT_HASH, Cluster, make_cache

CACHE = probe(make_cache(seed=0), NUM_BLOCKS, FACTS)
HELLO = Hello(
    "importer", 0, CACHE.layout.fingerprint(), CACHE.layout.fields(), "here", ["zmq"], exporter_epoch="us", pid=0
)


def change(message: Hello, **changes: object) -> Hello:
    return msgspec.structs.replace(message, **changes)


def an_exporter(*importers: bytes) -> Exporter:
    settings = replace(Cluster(Path("unused")).settings(), lease_first_s=30, lease_renew_s=20, attach_wait_s=5)
    exporter = Exporter(settings, CACHE, RankIdentity("us", "here", 1))
    for importer in importers:
        exporter.receive(0.0, importer, change(HELLO, epoch=importer.decode()))
    exporter.outbox.clear()
    return exporter


def attach(exporter: Exporter, importer: bytes, transfer_id: str, num_tokens: int = 12, now_s: float = 0.0) -> None:
    exporter.receive(now_s, importer, Attach(transfer_id, "us", num_tokens, PROMPT_HASH, True))


def fetch(transfer_id: str, fetch_id: int, block_ids: list[int] | None = None, attempt: int = 0) -> Fetch:
    return Fetch(transfer_id, attempt, fetch_id, 0, NUM_LAYERS, block_ids or [1])


def told(exporter: Exporter) -> list[FromExporter]:
    said = [message for _, message in exporter.outbox]
    exporter.outbox.clear()
    return said


def served(exporter: Exporter) -> list[tuple[bytes, int]]:
    found = []
    while following := exporter.next_fetch():
        found.append((following[0], following[1].fetch_id))
    return found


def test_a_large_transfer_does_not_stall_a_small_one() -> None:
    exporter = an_exporter(b"a", b"b")
    for importer, transfer_id in ((b"a", "large"), (b"b", "small")):
        exporter.open(0.0, transfer_id, PROMPT_HASH, 12)
        exporter.announce(0.0, transfer_id, [1, 2, 3], 12)
        attach(exporter, importer, transfer_id)
    for fetch_id in range(20):
        exporter.receive(0.0, b"a", fetch("large", fetch_id))
    exporter.receive(0.0, b"b", fetch("small", 100))
    assert served(exporter)[:3] == [(b"a", 0), (b"b", 100), (b"a", 1)]


def test_only_new_blocks_are_announced_and_a_late_importer_hears_all() -> None:
    exporter = an_exporter(b"a", b"b")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"a", "t")
    told(exporter)
    exporter.announce(0.0, "t", [1], 3)
    exporter.announce(0.0, "t", [1, 2], 8)
    exporter.announce(0.0, "t", [1, 2], 8)
    assert told(exporter) == [Ready("t", 0, 0, [1], 3), Ready("t", 0, 1, [2], 8)]
    attach(exporter, b"b", "t")
    assert told(exporter)[1:] == [Ready("t", 0, 0, [1, 2], 8)]


def test_layers_are_announced_once_and_a_late_importer_hears_of_them() -> None:
    exporter = an_exporter(b"a", b"b", b"c")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"a", "t")
    exporter.announce(0.0, "t", [1], 4)
    told(exporter)
    for num_layers in (1, 2, 2):
        exporter.announce(0.0, "t", [1, 2, 3], 12, num_layers)
    assert told(exporter) == [Ready("t", 0, 1, [2, 3], 12, 1), Ready("t", 0, 3, [], 12, 2)]
    attach(exporter, b"b", "t")
    assert told(exporter)[1:] == [Ready("t", 0, 0, [1, 2, 3], 4), Ready("t", 0, 3, [], 12, 2)]
    exporter.announce(0.0, "t", [1, 2, 3], 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12, 3)
    assert told(exporter) == [Ready("t", 0, 3, [], 12)] * 2, "each of the two importers once"
    attach(exporter, b"c", "t")
    assert told(exporter)[1:] == [Ready("t", 0, 0, [1, 2, 3], 12)]


@pytest.mark.parametrize(("block_ids", "num_tokens"), [([1], 4), ([1, 2, 3], 9), ([4, 2, 3], 12)], ids=str)
def test_a_prefill_that_starts_over_without_saying_so_voids_its_layers(block_ids: list[int], num_tokens: int) -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"a", "t")
    exporter.announce(0.0, "t", [1, 2, 3], 12, 2)
    told(exporter)
    exporter.announce(0.0, "t", block_ids, num_tokens)
    assert told(exporter) == [Ready("t", 1, 0, [], 0), Ready("t", 1, 0, block_ids, num_tokens)]


def test_a_prefill_that_starts_over_voids_its_layers() -> None:
    exporter = an_exporter(b"a", b"b")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12, 2)
    exporter.restart(0.0, "t")
    attach(exporter, b"a", "t")
    assert told(exporter)[1:] == [Ready("t", 1, 0, [], 0)]
    exporter.announce(0.0, "t", [1, 2, 3], 12, 1)
    assert told(exporter) == [Ready("t", 1, 0, [1, 2, 3], 12, 1)]


def test_fetches_of_an_attempt_that_is_over_are_not_served() -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12)
    attach(exporter, b"a", "t")
    exporter.receive(0.0, b"a", fetch("t", 1))
    exporter.restart(0.0, "t")
    assert served(exporter) == []
    exporter.receive(0.0, b"a", fetch("t", 2))
    assert served(exporter) == []


def test_fetches_of_a_transfer_that_was_called_off_are_not_served() -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12)
    attach(exporter, b"a", "t")
    exporter.receive(0.0, b"a", fetch("t", 1))
    exporter.drop(0.0, ["t"])
    assert served(exporter) == []
    exporter.receive(0.0, b"a", fetch("t", 2))
    assert served(exporter) == []


@pytest.mark.parametrize(
    "bad",
    [
        fetch("t", 1, [1, 4]),
        fetch("t", 1, [-1]),
        Fetch("t", 0, 1, 0, NUM_LAYERS + 1, [1]),
        Fetch("t", 0, 1, -1, 1, [1]),
        Fetch("t", 0, 1, 0, 0, [1]),
        Fetch("t", 0, 1, 1 << 70, 1, [1]),
        Fetch("t", 0, 1, 0, 1, []),
        Fetch("t", 0, 1, 0, NUM_LAYERS, [1] * (1 << 18)),
    ],
)
def test_a_fetch_of_what_was_not_offered_is_refused(bad: Fetch) -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12)
    attach(exporter, b"a", "t")
    with pytest.raises(BadFrame):
        exporter.receive(0.0, b"a", bad)
    assert served(exporter) == []


def test_the_queue_of_fetches_is_bounded() -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12)
    attach(exporter, b"a", "t")
    for fetch_id in range(64):
        exporter.receive(0.0, b"a", fetch("t", fetch_id))
    with pytest.raises(BadFrame, match="64 fetches waiting"):
        exporter.receive(0.0, b"a", fetch("t", 64))


def test_nobody_is_served_a_transfer_that_it_did_not_attach() -> None:
    exporter = an_exporter(b"a", b"b")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", [1, 2, 3], 12)
    attach(exporter, b"a", "t")
    exporter.receive(0.0, b"b", fetch("t", 1))
    assert served(exporter) == []
    with pytest.raises(BadFrame, match="not welcomed"):
        exporter.receive(0.0, b"stranger", fetch("t", 1))


def test_a_beat_renews_what_is_held_and_names_what_is_gone() -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "held", PROMPT_HASH, 12)
    attach(exporter, b"a", "held")
    attach(exporter, b"a", "not yet open")
    exporter.finish(0.0, "held", [1, 2, 3], 12, 7)
    told(exporter)
    exporter.receive(25.0, b"a", Beat(["held", "not yet open", "gone"]))
    assert told(exporter) == [BeatAck(45.0, ["held", "not yet open"], ["gone"])]
    exporter.sweep(44.9)
    assert not exporter.closed
    exporter.sweep(45.0)
    assert [closed.outcome for closed in exporter.closed] == ["expired"]
    assert exporter.failures == {"lease_expired": 1}


def test_the_proxy_can_hold_what_no_importer_has_attached() -> None:
    exporter = an_exporter()
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.finish(0.0, "t", [1, 2, 3], 12, 7)
    exporter.hold(29.0, ["t", "unknown"])
    exporter.sweep(48.9)
    assert not exporter.closed
    exporter.drop(48.9, ["t", "unknown"])
    assert [closed.outcome for closed in exporter.closed] == ["dropped"]


def test_a_dropped_prefill_closes_when_it_ends() -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"a", "t")
    told(exporter)
    exporter.drop(0.0, ["t"])
    assert told(exporter) == [Failed("t", "aborted", "the proxy dropped the transfer")]
    assert not exporter.closed
    exporter.finish(0.0, "t", [1, 2, 3], 12, 7)
    assert [closed.outcome for closed in exporter.closed] == ["dropped"]


def test_who_asks_for_a_closed_transfer_hears_why_it_closed() -> None:
    exporter = an_exporter(b"a")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.abort(0.0, "t", "the client left")
    attach(exporter, b"a", "t")
    assert told(exporter) == [Failed("t", "aborted", "the export was aborted: the client left")]


def test_a_release_before_the_export_is_opened_is_remembered() -> None:
    exporter = an_exporter(b"a")
    attach(exporter, b"a", "t")
    exporter.receive(0.0, b"a", Release("t"))
    exporter.open(1.0, "t", PROMPT_HASH, 12)
    exporter.finish(2.0, "t", [1, 2, 3], 12, 7)
    assert [closed.outcome for closed in exporter.closed] == ["released"]


def test_an_importer_that_reconnects_loses_its_former_attachments() -> None:
    exporter = an_exporter()
    exporter.receive(0.0, b"first", change(HELLO, links=["host"], pid=5))
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"first", "t")
    exporter.finish(0.0, "t", [1, 2, 3], 12, 7)
    exporter.receive(0.0, b"second", change(HELLO, links=["host"], pid=5))
    assert exporter.welcomed == [("importer", 5)], "watched once, however often it connects"
    exporter.abort(0.0, "t", "for a test")
    assert [closed.outcome for closed in exporter.closed] == ["aborted"]


def test_an_importer_that_means_our_predecessor_is_told_so() -> None:
    exporter = an_exporter()
    exporter.receive(0.0, b"a", change(HELLO, exporter_epoch="before"))
    (refused,) = told(exporter)
    assert isinstance(refused, Refused)
    assert refused.epoch == "us"


def test_memory_is_described_only_to_importers_that_read_it() -> None:
    exporter = an_exporter()
    for links, num_regions in ((["host"], NUM_LAYERS), (["zmq"], 0)):
        exporter.receive(0.0, b"a", change(HELLO, links=links))
        (welcome,) = told(exporter)
        assert isinstance(welcome, Welcome)
        assert len(welcome.regions) == num_regions


def test_blocks_are_no_message_for_an_exporter() -> None:
    with pytest.raises(BadFrame):
        from_importer(encode(Blocks("t", 1, 2)))
