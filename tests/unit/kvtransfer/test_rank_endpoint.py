"""Two ranks over real sockets: what arrives, when, and how a transfer ends if nobody dies."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.copy_plan import CopyPlan
from kvtransfer.endpoint import copy_threads
from kvtransfer.links.host_memory import read_memory
from tests.unit.kvtransfer.rank_pair import FACTS, PROMPT_HASH, Cluster, Rank, eventually

Pair = tuple[Rank, Rank]


@pytest.mark.parametrize("shape", ["block first", "K and V apart"])
def test_blocks_arrive_as_they_were(cluster: Cluster, link: str, shape: str) -> None:
    exporter, importer = cluster.rank(shape, links=(link,)), cluster.rank(shape, links=(link,))
    theirs, ours = [5, 6, 7, 30, 2], [10, 11, 40, 41, 42]
    importer.import_("t", exporter, ours, num_tokens=18)
    exporter.export("t", theirs, 18, first_token=7)
    closed = importer.closed_import()
    assert (closed.outcome, closed.link, closed.first_token, closed.bad_block_ids) == ("loaded", link, 7, [])
    assert closed.bytes_moved == 5 * importer.map.layout.block_bytes
    assert importer.holds(ours, exporter, theirs)
    assert exporter.closed_export().outcome == "released"


def test_no_block_is_touched_but_those_that_were_placed(pair: Pair) -> None:
    exporter, importer = pair
    before = {layer: cache.copy() for layer, cache in importer.cache.items()}
    importer.import_("t", exporter, [20, 21], num_tokens=16, first_block=2)
    exporter.export("t", [1, 2, 3, 4], 16)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([20, 21], exporter, [3, 4])
    untouched = [block for block in range(len(before["layers.0.attention"])) if block not in (20, 21)]
    assert all((importer.cache[layer][untouched] == before[layer][untouched]).all() for layer in before)


def test_blocks_move_while_the_prefill_still_computes(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.endpoint.announce("t", [1, 2], 8)
    eventually(lambda: sum(importer.endpoint.stats().bytes_in.values()) == 2 * importer.map.layout.block_bytes)
    assert not importer.has_closed(0.05)
    exporter.endpoint.finish_export("t", [1, 2, 3], 12, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8, 9], exporter, [1, 2, 3])


def test_the_place_may_be_known_last(pair: Pair) -> None:
    exporter, importer = pair
    exporter.export("t", [1, 2, 3], 12)
    importer.attach("t", exporter, num_tokens=12)
    assert not importer.has_closed(0.1)
    importer.endpoint.place_import("t", 0, [7, 8, 9])
    assert importer.closed_import().outcome == "loaded"


def test_an_import_that_has_everything_moves_no_byte_and_gets_the_token(pair: Pair) -> None:
    exporter, importer = pair
    importer.import_("t", exporter, [], num_tokens=8, first_block=2)
    exporter.export("t", [1, 2], 8, first_token=31)
    closed = importer.closed_import()
    assert (closed.outcome, closed.first_token, closed.bytes_moved) == ("loaded", 31, 0)
    assert exporter.closed_export().outcome == "released"


def test_the_token_may_come_from_the_proxy(pair: Pair) -> None:
    exporter, importer = pair
    importer.import_("t", exporter, [7, 8], num_tokens=8)
    exporter.export("t", [1, 2], 8, first_token=None)
    assert exporter.closed_export().outcome == "released"
    assert not importer.has_closed(0.05)
    importer.endpoint.give_first_token("t", 12)
    assert (importer.closed_import().outcome, importer.closed_import().first_token) == ("loaded", 12)


def test_the_proxy_may_be_faster_than_our_own_engine(pair: Pair) -> None:
    exporter, importer = pair
    importer.endpoint.give_first_token("t", 12)
    importer.import_("t", exporter, [7, 8], num_tokens=8)
    exporter.export("t", [1, 2], 8, first_token=None)
    assert importer.closed_import().first_token == 12


def test_the_exact_mode_needs_no_token(pair: Pair) -> None:
    exporter, importer = pair
    importer.import_("t", exporter, [7, 8], num_tokens=8, wants_first_token=False)
    exporter.export("t", [1, 2], 8, first_token=4)
    assert (importer.closed_import().outcome, importer.closed_import().first_token) == ("loaded", None)


def test_a_restarted_prefill_is_copied_anew(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.endpoint.announce("t", [1, 2], 8)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    exporter.endpoint.restart_export("t")
    for cache in exporter.cache.values():
        cache[[1, 2]] = 0
    exporter.endpoint.announce("t", [2, 5], 8)
    exporter.endpoint.finish_export("t", [2, 5, 1], 12, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8, 9], exporter, [2, 5, 1])


def test_an_unannounced_change_of_blocks_counts_as_a_restart(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.endpoint.announce("t", [1, 2], 8)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    exporter.endpoint.finish_export("t", [4, 5, 6], 12, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8, 9], exporter, [4, 5, 6])


def test_cancelling_releases_the_exporter(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.attach("t", exporter, num_tokens=12)
    importer.endpoint.cancel_import("t")
    assert importer.closed_import().outcome == "cancelled"
    exporter.endpoint.finish_export("t", [1, 2, 3], 12, 7)
    assert exporter.closed_export(timeout_s=1).outcome == "released"


def test_an_aborted_export_makes_the_importer_recompute(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12, wants_first_token=False)
    exporter.endpoint.announce("t", [1], 4)
    exporter.endpoint.abort_export("t", "the client left")
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "aborted", [7, 8, 9])
    assert "the client left" in closed.reason
    assert exporter.closed_export().outcome == "aborted"


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [({"prompt_hash": b"another"}, "mismatch"), ({"num_tokens": 11}, "mismatch"), ({"epoch": "old"}, "peer_lost")],
    ids=["prompt", "length", "epoch"],
)
def test_an_importer_that_means_another_transfer_recomputes(pair: Pair, theirs: dict[str, object], kind: str) -> None:
    exporter, importer = pair
    exporter.export("t", [1, 2, 3], 12)
    importer.import_(
        "t", exporter, [7, 8, 9], **{"num_tokens": 12, "wants_first_token": False, **theirs}  # type: ignore[arg-type]
    )  # fmt: skip
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind) == ("recompute", kind)
    assert closed.bytes_moved == 0


def test_an_attach_waits_a_while_for_its_export(pair: Pair) -> None:
    exporter, importer = pair
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    time.sleep(0.25)
    exporter.export("t", [1, 2, 3], 12)
    assert importer.closed_import().outcome == "loaded"


def test_a_transfer_that_nobody_opened_is_unknown(cluster: Cluster, link: str) -> None:
    exporter, importer = cluster.rank(links=(link,), attach_wait_s=0.2), cluster.rank(links=(link,))
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12, wants_first_token=False)
    closed = importer.closed_import(timeout_s=1)
    assert (closed.outcome, closed.failure_kind) == ("recompute", "unknown_transfer")


def test_ranks_with_different_layouts_are_not_paired(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(), cluster.rank(facts=replace(FACTS, kv_dtype="fp8"))
    for transfer_id in ("first", "second"):
        exporter.export(transfer_id, [1, 2, 3], 12)
        importer.import_(transfer_id, exporter, [7, 8, 9], num_tokens=12, wants_first_token=False)
        closed = importer.closed_import(transfer_id)
        assert (closed.outcome, closed.failure_kind) == ("recompute", "refused")
        assert "kv_dtype is bfloat16 here and fp8 there" in closed.reason
        assert "(differing: kv_dtype)" in closed.reason


def test_ranks_without_a_link_in_common_are_not_paired(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(links=("zmq",)), cluster.rank(links=("host",))
    importer.import_("t", exporter, [7], num_tokens=4, wants_first_token=False)
    assert importer.closed_import().failure_kind == "refused"


def test_the_second_link_is_used_where_memory_cannot_be_read(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.endpoint.loop.why_unreadable", lambda pid, address: "no rights, says the test")
    exporter, importer = cluster.rank(), cluster.rank()
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert (importer.closed_import().outcome, importer.closed_import().link) == ("loaded", "zmq")
    eventually(lambda: importer.endpoint.stats().peers)
    (link_and_why,) = importer.endpoint.stats().peers.values()
    assert link_and_why.startswith("zmq: ")
    assert "no rights, says the test" in link_and_why


def test_an_expired_export_frees_its_blocks_and_fails_who_comes_later(cluster: Cluster, link: str) -> None:
    exporter, importer = cluster.rank(links=(link,), lease_first_s=0.2), cluster.rank(links=(link,))
    exporter.export("t", [1, 2, 3], 12)
    assert exporter.closed_export(timeout_s=1).outcome == "expired"
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12, wants_first_token=False)
    assert importer.closed_import(timeout_s=1).failure_kind == "lease_expired"


def test_a_waiting_importer_keeps_the_lease_alive(cluster: Cluster) -> None:
    """Queued is not dead."""
    leases: dict[str, Any] = {"lease_first_s": 0.6, "lease_renew_s": 0.6, "beat_s": 0.1}
    exporter, importer = cluster.rank(**leases), cluster.rank(**leases)
    importer.attach("t", exporter, num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert not exporter.has_closed(1.0)
    importer.endpoint.place_import("t", 0, [7, 8, 9])
    assert importer.closed_import().outcome == "loaded"


def test_ranks_with_one_setting_have_addresses_of_their_own(cluster: Cluster) -> None:
    first, second = cluster.rank(name="worker-kv", rank=0), cluster.rank(name="worker-kv", rank=1)
    assert first.endpoint.address != second.endpoint.address


def test_tcp_works_like_ipc(cluster: Cluster, link: str) -> None:
    exporter = cluster.rank(links=(link,), bind="tcp://127.0.0.1:0")
    importer = cluster.rank(links=(link,))
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8, 9], exporter, [1, 2, 3])


def test_equal_ids_do_not_mix(pair: Pair) -> None:
    """A second export under an id in use changes nothing."""
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, 8)
    exporter.endpoint.open_export("t", b"another", 99)
    importer.import_("t", exporter, [7, 8], num_tokens=8)
    importer.import_("t", exporter, [9, 10], num_tokens=99)
    exporter.endpoint.finish_export("t", [1, 2], 8, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8], exporter, [1, 2])
    assert exporter.closed_export().outcome == "released"


def test_block_ids_outside_of_the_cache_are_refused_at_once(pair: Pair) -> None:
    exporter, importer = pair
    with pytest.raises(ValueError, match="64 blocks"):
        exporter.endpoint.announce("t", [1, 64], 8)
    with pytest.raises(ValueError, match="64 blocks"):
        importer.endpoint.place_import("t", 0, [-1])


class Gate:
    """Holds the copy thread before it reads, as a slow copy would."""

    def __init__(self) -> None:
        self.arrived, self.open = threading.Event(), threading.Event()

    def read_memory(self, pid: int, plan: CopyPlan) -> None:
        self.arrived.set()
        assert self.open.wait(5)
        read_memory(pid, plan)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(copy_threads, "read_memory", gate.read_memory)
    yield gate
    gate.open.set()


def test_a_cancelled_load_closes_only_after_the_copy_is_quiet(cluster: Cluster, gate: Gate) -> None:
    exporter, importer = cluster.rank(links=("host",)), cluster.rank(links=("host",))
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert gate.arrived.wait(5)
    importer.endpoint.cancel_import("t")
    assert not importer.has_closed(0.2)
    assert not exporter.has_closed(0.0)
    gate.open.set()
    assert importer.closed_import().outcome == "cancelled"
    assert exporter.closed_export().outcome == "released"


def test_aborted_blocks_are_freed_only_after_the_copy_is_quiet(cluster: Cluster, gate: Gate) -> None:
    exporter, importer = cluster.rank(links=("host",)), cluster.rank(links=("host",))
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert gate.arrived.wait(5)
    exporter.endpoint.abort_export("t", "for a test")
    assert not exporter.has_closed(0.2)
    gate.open.set()
    assert exporter.closed_export().outcome == "aborted"
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "aborted", [7, 8, 9])


def test_what_was_read_after_the_lease_is_void(cluster: Cluster, gate: Gate) -> None:
    slow_beats: dict[str, Any] = {"lease_first_s": 0.3, "lease_renew_s": 0.3, "beat_s": 0.25}
    exporter = cluster.rank(links=("host",), **slow_beats)
    importer = cluster.rank(links=("host",), lease_renew_s=9, beat_s=8)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert gate.arrived.wait(5)
    assert exporter.closed_export(timeout_s=2).outcome == "expired"
    gate.open.set()
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "lease_expired", [7, 8, 9])


def test_a_preemption_under_a_copy_leaves_no_trace(cluster: Cluster, gate: Gate) -> None:
    exporter, importer = cluster.rank(links=("host",)), cluster.rank(links=("host",))
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.endpoint.announce("t", [1, 2], 8)
    assert gate.arrived.wait(5)
    exporter.endpoint.restart_export("t")
    for cache in exporter.cache.values():
        cache[[1, 2]] = 0
    exporter.endpoint.finish_export("t", [4, 5, 6], 12, 7)
    gate.open.set()
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds([7, 8, 9], exporter, [4, 5, 6])


def test_closing_at_once_still_ends_what_was_being_copied(cluster: Cluster, gate: Gate) -> None:
    exporter, importer = cluster.rank(links=("host",)), cluster.rank(links=("host",))
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    exporter.export("t", [1, 2, 3], 12)
    assert gate.arrived.wait(5)
    threading.Timer(0.1, gate.open.set).start()
    importer.endpoint.close(timeout_s=0)
    assert [closing.outcome for closing in importer.endpoint.take_closed_imports()] == ["cancelled"]
