"""The link `nccl` between endpoints on fake GPUs: moving, failing, coming back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.links.nccl import NcclLink
from kvtransfer.links.nccl_pairs import SendingPairs
from kvtransfer.messages import Sending
from tests.unit.kvtransfer.fake_cuda import FakeStream
from tests.unit.kvtransfer.gpu_pair import RUN_BYTES, GpuCluster, GpuRank, link_of
from tests.unit.kvtransfer.rank_pair import NUM_LAYERS, PROMPT_HASH, eventually

BLOCKS = list(range(1, 41))
OURS = list(range(60, 20, -1))
NUM_TOKENS = 4 * len(BLOCKS)
NCCL = ("nccl", "zmq")


@pytest.fixture
def gpus(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCluster]:
    with GpuCluster(directory, monkeypatch).closing() as cluster:
        yield cluster


@pytest.fixture
def pair(gpus: GpuCluster) -> tuple[GpuRank, GpuRank]:
    return gpus.rank(device=0, links=NCCL), gpus.rank(device=1, links=NCCL)


def meet(importer: GpuRank, exporter: GpuRank) -> None:
    importer.endpoint.meet(exporter.endpoint.address, exporter.endpoint.epoch)
    eventually(lambda: importer.endpoint.stats().peers)


def busy_streams(rank: GpuRank) -> list[FakeStream]:
    """Those with something in them, as soon as there are any."""
    eventually(lambda: any(stream.operations for stream in rank.process.streams.values()))
    return [stream for stream in rank.process.streams.values() if stream.operations]


def transfer(name: str, exporter: GpuRank, importer: GpuRank) -> None:
    """Completes, whatever happens on the way."""
    exporter.export(name, BLOCKS, NUM_TOKENS)
    importer.import_(name, exporter, OURS, NUM_TOKENS)
    closed = importer.closed_import(name)
    assert (closed.outcome, closed.link, closed.reason) == ("loaded", "nccl", "")
    assert closed.bytes_moved == len(BLOCKS) * NUM_LAYERS * 2 * RUN_BYTES
    assert importer.holds(OURS, exporter, BLOCKS)
    assert exporter.closed_export(name).outcome == "released"


def test_blocks_arrive_as_they_were(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    transfer("t", exporter, importer)
    assert link_of(importer).startswith("nccl: both ranks have a GPU and NCCL")


@pytest.mark.parametrize("old_cupy", [False, True])
def test_either_form_of_cupys_unique_id_is_understood(
    directory: Path, monkeypatch: pytest.MonkeyPatch, old_cupy: bool
) -> None:
    with GpuCluster(directory, monkeypatch, old_cupy=old_cupy).closing() as gpus:
        transfer("t", gpus.rank(device=0, links=NCCL), gpus.rank(device=1, links=NCCL))


def test_the_communicator_is_there_before_the_first_transfer(gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    assert gpus.network.num_made == 2, "one for each rank"
    for name in ("t", "u", "v"):
        transfer(name, exporter, importer)
    assert gpus.network.num_made == 2


def test_transfers_share_a_communicator_in_turns(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    names = [f"transfer {number}" for number in range(8)]
    for number, name in enumerate(names):
        exporter.export(name, BLOCKS[number * 5 : number * 5 + 5], 20)
        importer.import_(name, exporter, OURS[number * 5 : number * 5 + 5], 20)
    for number, name in enumerate(names):
        assert importer.closed_import(name).outcome == "loaded"
        these = slice(number * 5, number * 5 + 5)
        assert importer.holds(OURS[these], exporter, BLOCKS[these])


def test_one_importer_takes_from_several_exporters_and_one_exporter_serves_several_importers(gpus: GpuCluster) -> None:
    exporters = [gpus.rank(device=device, links=NCCL) for device in (0, 1)]
    importers = [gpus.rank(device=device, links=NCCL) for device in (2, 3)]
    for exporter in exporters:
        for importer in importers:
            name = f"{exporter.process.pid} to {importer.process.pid}"
            exporter.export(name, BLOCKS, NUM_TOKENS)
            ids = OURS[:20] if exporter is exporters[0] else OURS[20:]
            importer.import_(name, exporter, ids, NUM_TOKENS, first_block=20)
    for exporter in exporters:
        for importer in importers:
            assert importer.closed_import(f"{exporter.process.pid} to {importer.process.pid}").outcome == "loaded"
            ids = OURS[:20] if exporter is exporters[0] else OURS[20:]
            assert importer.holds(ids, exporter, BLOCKS[20:])


def test_a_cut_network_costs_a_communicator_and_no_transfer(gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    with gpus.machine.paused():
        exporter.export("t", BLOCKS, NUM_TOKENS)
        importer.import_("t", exporter, OURS, NUM_TOKENS)
        busy_streams(exporter)
        gpus.network.cut()
    closed = importer.closed_import()
    assert (closed.outcome, closed.link) == ("loaded", "nccl")
    assert importer.holds(OURS, exporter, BLOCKS)
    assert gpus.network.num_made == 4
    assert gpus.network.num_aborted == 2
    transfer("u", exporter, importer)


def test_a_network_cut_while_idle_costs_a_communicator_and_no_transfer(
    gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]
) -> None:
    exporter, importer = pair
    for name in ("t", "u", "v", "w", "x"):  # more often than a pair may fail in a row
        transfer(name, exporter, importer)
        gpus.network.cut()
    transfer("y", exporter, importer)
    assert gpus.network.num_made == 12


def test_an_exporter_killed_in_mid_send_means_recompute(gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
    exporter.endpoint.announce("t", BLOCKS[:30], 120)
    importer.import_("t", exporter, OURS, NUM_TOKENS, wants_first_token=False)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    exporter.kill()
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind) == ("recompute", "peer_lost")
    eventually(lambda: gpus.network.num_aborted == 1)
    successor = gpus.rank(device=0, links=NCCL)
    transfer("u", successor, importer)


def test_an_import_closes_only_when_no_receive_writes_into_its_blocks(
    gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]
) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    with gpus.machine.holding(importer.process.streams.values()):
        exporter.export("t", BLOCKS, NUM_TOKENS)
        importer.import_("t", exporter, OURS, NUM_TOKENS, wants_first_token=False)
        receiving = busy_streams(importer)
    with gpus.machine.holding(receiving):
        importer.endpoint.cancel_import("t")
        exporter.kill()
        assert not importer.has_closed(0.2)
    assert importer.closed_import().outcome == "cancelled"


def test_an_importers_death_does_not_hold_the_others_up(gpus: GpuCluster) -> None:
    exporter = gpus.rank(device=0, links=NCCL, lease_first_s=1.0, lease_renew_s=1.0)
    victim, importer = (gpus.rank(device=device, links=NCCL) for device in (1, 2))
    meet(victim, exporter)
    with gpus.machine.holding(victim.process.streams.values()):
        exporter.export("t", BLOCKS, NUM_TOKENS)
        victim.import_("t", exporter, OURS, NUM_TOKENS)
        busy_streams(victim)
        victim.kill()
    transfer("u", exporter, importer)
    assert exporter.closed_export("t").outcome == "expired"
    eventually(lambda: gpus.network.num_aborted == 1)


def test_blocks_cancelled_while_they_are_sent_do_not_disturb_those_after_them(
    gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]
) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    for number in range(10):
        name = f"cancelled {number}"
        exporter.export(name, BLOCKS, NUM_TOKENS)
        importer.import_(name, exporter, OURS, NUM_TOKENS)
        if number % 2:
            eventually(lambda: importer.endpoint._loop.importer.nccl._receiving)
        importer.endpoint.cancel_import(name)
        assert importer.closed_import(name).outcome in ("cancelled", "loaded")
    transfer("t", exporter, importer)
    assert gpus.network.num_made == 2


def test_blocks_given_up_while_they_are_gathered_are_not_sent(gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    sent_before = gpus.network.num_sent
    with gpus.machine.holding(exporter.process.streams.values()):
        exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
        exporter.endpoint.announce("t", list(range(41, 61)), 80)
        importer.import_("t", exporter, OURS, NUM_TOKENS)
        busy_streams(exporter)
        exporter.endpoint.restart_export("t")
        exporter.endpoint.finish_export("t", BLOCKS, NUM_TOKENS, 7)
        eventually(lambda: exporter.endpoint.stats().exports_open)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds(OURS, exporter, BLOCKS)
    assert gpus.network.num_sent - sent_before == len(BLOCKS) // 2, "two blocks fit into a staging buffer"


def test_a_wrong_order_breaks_the_communicator_and_is_made_good(
    gpus: GpuCluster, pair: tuple[GpuRank, GpuRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    gathered = SendingPairs.gathered
    announced: list[Sending] = []

    def swapped(pairs: SendingPairs, *arguments: Any) -> None:
        """The first two sends are announced in the wrong order."""
        before = len(pairs.outbox)
        gathered(pairs, *arguments)
        new = [message for _, message in pairs.outbox[before:] if isinstance(message, Sending)]
        announced.extend(new)
        if new and len(announced) <= 2:
            importer_id = pairs.outbox[-1][0]
            pairs.outbox[-1:] = [] if len(announced) == 1 else [(importer_id, it) for it in reversed(announced)]

    monkeypatch.setattr(SendingPairs, "gathered", swapped)
    transfer("t", exporter, importer)
    assert gpus.network.num_made == 4


def test_sizes_that_differ_are_noticed_by_the_clock_and_made_good(
    gpus: GpuCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = gpus.rank(device=0, links=NCCL), gpus.rank(device=1, links=NCCL, stalled_after_s=2.0)
    meet(importer, exporter)
    send = NcclLink._send
    shortened: list[int] = []

    def short(link: NcclLink, it: Any, fetch_id: int) -> None:
        if not shortened:
            shortened.append(fetch_id)
            buffer, num_bytes = it.gathered[fetch_id]
            it.gathered[fetch_id] = (buffer, num_bytes - 16)
        send(link, it, fetch_id)

    monkeypatch.setattr(NcclLink, "_send", short)
    transfer("t", exporter, importer)
    assert gpus.network.num_made == 4


def test_the_communicator_idle_longest_makes_room(gpus: GpuCluster) -> None:
    exporters = [gpus.rank(device=device, links=NCCL) for device in (0, 1, 2)]
    importer = gpus.rank(device=3, links=NCCL, max_communicators=2)
    for exporter in exporters[:2]:
        importer.endpoint.meet(exporter.endpoint.address, exporter.endpoint.epoch)
    eventually(lambda: len(importer.endpoint.stats().peers) == 2)
    transfer("a", exporters[0], importer)
    made = gpus.network.num_made
    transfer("b", exporters[2], importer)  # in place of the one with exporter 1
    transfer("c", exporters[0], importer)
    assert gpus.network.num_made == made + 2, "the one used last was kept"
    transfer("d", exporters[1], importer)
    assert gpus.network.num_made == made + 4
    eventually(lambda: gpus.network.num_made - gpus.network.num_aborted == 4)


def test_an_exporter_makes_room_too(gpus: GpuCluster) -> None:
    exporter = gpus.rank(device=0, links=NCCL, max_communicators=1)
    importers = [gpus.rank(device=device, links=NCCL) for device in (1, 2)]
    for number in range(3):
        for importer in importers:
            transfer(f"{importer.process.pid} {number}", exporter, importer)
    eventually(lambda: gpus.network.num_made - gpus.network.num_aborted == 2)


def test_ranks_that_cannot_connect_take_the_next_link_and_say_why(
    gpus: GpuCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = gpus.rank(device=0, links=NCCL), gpus.rank(device=1, links=NCCL, prepare_within_s=0.2)
    monkeypatch.setattr(exporter.process.cuda.nccl, "NcclCommunicator", None)
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    closed = importer.closed_import()
    assert (closed.outcome, closed.link) == ("loaded", "zmq")
    assert importer.holds(OURS, exporter, BLOCKS)
    assert link_of(importer).startswith("zmq: the best link that both ranks can use; nccl: ")
    assert "could not be built" in link_of(importer)


def test_a_side_that_never_joins_is_not_waited_for_longer_than_agreed(
    gpus: GpuCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = gpus.rank(device=0, links=NCCL, prepare_within_s=0.3)
    importer = gpus.rank(device=1, links=NCCL, prepare_within_s=0.3)
    monkeypatch.setattr("kvtransfer.links.nccl_pairs.ReceivingPairs.offered", lambda *arguments: None)
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    assert importer.closed_import().link == "zmq"
    assert "within 0.3 s" in link_of(importer)


def test_a_network_that_never_carries_anything_gives_the_pair_to_the_next_link(
    gpus: GpuCluster, pair: tuple[GpuRank, GpuRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = pair
    meet(importer, exporter)
    monkeypatch.setattr(gpus.network, "is_cut", True)
    gpus.network.cut()
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    closed = importer.closed_import(timeout_s=15)
    assert (closed.outcome, closed.failure_kind) == ("recompute", "transport")
    exporter.export("u", BLOCKS, NUM_TOKENS)
    importer.import_("u", exporter, OURS, NUM_TOKENS)
    closed = importer.closed_import("u")
    assert (closed.outcome, closed.link) == ("loaded", "zmq")


def test_different_versions_of_nccl_are_not_paired(gpus: GpuCluster) -> None:
    exporter, importer = gpus.rank(device=0, links=NCCL, nccl_version=1), gpus.rank(device=1, links=NCCL)
    meet(importer, exporter)
    assert "nccl: NCCL is 22703 at the importer and 1 at the exporter" in link_of(importer)
