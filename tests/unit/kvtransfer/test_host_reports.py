"""What a worker host hears from its ranks, and what it can tell them."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtransfer.host_messages import (
    DropExports,
    ExportStarted,
    FirstToken,
    FromRank,
    HoldExports,
    ImportClosed,
    MeetExporters,
    RankReady,
    RankStats,
    ToRank,
)
from tests.unit.kvtransfer.rank_pair import FACTS, PROMPT_HASH, Cluster, eventually


class Host:
    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.address = f"ipc://{directory}/host"
        self.socket.bind(self.address)
        self.heard: list[FromRank] = []
        self.ranks: list[bytes] = []

    def hear(self, kind: type[msgspec.Struct], timeout_s: float = 3.0) -> msgspec.Struct:
        """The first message of that kind, in the order in which they came."""
        until_s = time.monotonic() + timeout_s
        while not (found := [message for message in self.heard if isinstance(message, kind)]):
            assert self.socket.poll(max(0, int((until_s - time.monotonic()) * 1000))), f"no {kind.__name__} came"
            self.listen()
        self.heard.remove(found[0])
        return found[0]

    def listen(self) -> None:
        while self.socket.poll(0):
            rank, frame = self.socket.recv_multipart()
            if rank not in self.ranks:
                self.ranks.append(rank)
            self.heard.append(msgspec.msgpack.decode(frame, type=FromRank))

    def tell(self, message: ToRank, rank: int = 0) -> None:
        self.socket.send_multipart([self.ranks[rank], msgspec.msgpack.encode(message)])


@pytest.fixture
def host(directory: Path) -> Iterator[Host]:
    host = Host(directory)
    yield host
    host.context.destroy(linger=0)


def test_a_rank_introduces_itself_at_start(cluster: Cluster, host: Host) -> None:
    rank = cluster.rank(report_to=host.address, rank=3)
    ready = host.hear(RankReady)
    assert isinstance(ready, RankReady)
    assert (ready.rank, ready.address, ready.epoch) == (3, rank.endpoint.address, rank.endpoint.epoch)
    assert ready.fingerprint == rank.map.layout.fingerprint()
    assert ready.block_bytes == rank.map.layout.block_bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_speaks_for_all(cluster: Cluster, host: Host, rank: int) -> None:
    exporter = cluster.rank(report_to=host.address, rank=rank)
    importer = cluster.rank(report_to=host.address, rank=rank)
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    exporter.endpoint.finish_export("t", [1, 2, 3], 12, 7)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    closed = importer.closed_import()
    if rank == 0:
        assert host.hear(ExportStarted) == ExportStarted("t")
        report = host.hear(ImportClosed)
        assert isinstance(report, ImportClosed)
        assert (report.outcome, report.bytes_moved, report.num_tokens) == ("loaded", closed.bytes_moved, 12)
    time.sleep(0.1)
    host.listen()
    assert not [message for message in host.heard if isinstance(message, ExportStarted | ImportClosed)]


def test_statistics_come_when_they_change_and_not_too_often(cluster: Cluster, host: Host) -> None:
    exporter, importer = cluster.rank(), cluster.rank(report_to=host.address)
    for number in range(20):
        exporter.export(f"t{number}", [1, 2, 3], 12)
        importer.import_(f"t{number}", exporter, [7, 8, 9], num_tokens=12)
        importer.closed_import(f"t{number}")
        time.sleep(0.01)
    time.sleep(1.2)
    host.listen()
    reports = [message for message in host.heard if isinstance(message, RankStats)]
    assert 1 <= len(reports) <= 3
    assert sum(reports[-1].bytes_in.values()) == 20 * 3 * importer.map.layout.block_bytes
    assert 0 < sum(reports[-1].copies_in.values()) <= 20 * 3, "small blocks go together"
    assert reports[-1].imports_open == 0


def test_the_exporter_tells_what_was_fetched_from_it_and_its_leases(cluster: Cluster, link: str) -> None:
    exporter, importer = cluster.rank(links=(link,)), cluster.rank(links=(link,))
    exporter.endpoint.open_export("computing", PROMPT_HASH, 12)
    exporter.export("held", [4], 4)
    exporter.export("t", [1, 2, 3], 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    moved = importer.closed_import().bytes_moved
    assert exporter.closed_export().outcome == "released"
    eventually(lambda: exporter.endpoint.stats().bytes_out == {link: moved})
    assert exporter.endpoint.stats().copy_out_s[link] > 0
    assert exporter.endpoint.stats().leases == {"computing": 1, "unwanted": 0, "held": 1, "ending": 0}


def test_the_host_can_drop_and_hold_exports(cluster: Cluster, host: Host) -> None:
    exporter = cluster.rank(report_to=host.address, lease_first_s=0.3, lease_renew_s=0.6)
    host.hear(RankReady)
    exporter.export("dropped", [1], 4)
    exporter.export("held", [2], 4)
    exporter.export("left alone", [3], 4)
    host.hear(ExportStarted)
    host.tell(DropExports(["dropped"]))
    host.tell(HoldExports(["held"]))
    assert exporter.closed_export("dropped").outcome == "dropped"
    assert exporter.closed_export("left alone").outcome == "expired"
    assert [closed.transfer_id for closed in exporter.closed_exports] == ["dropped", "left alone"]
    assert exporter.closed_export("held").outcome == "expired"


def test_the_host_can_give_the_first_token(cluster: Cluster, host: Host) -> None:
    exporter, importer = cluster.rank(), cluster.rank(report_to=host.address)
    host.hear(RankReady)
    exporter.export("t", [1, 2], 8, first_token=None)
    importer.import_("t", exporter, [7, 8], num_tokens=8)
    host.tell(FirstToken("t", 55))
    assert importer.closed_import().first_token == 55


def test_the_host_can_have_links_made_ready(cluster: Cluster, host: Host) -> None:
    facts = replace(FACTS, tp_size=2)
    exporters = [cluster.rank(rank=rank, facts=facts) for rank in (0, 1)]
    importer = cluster.rank(rank=1, facts=facts, report_to=host.address)
    host.hear(RankReady)
    ranks = [(exporter.endpoint.address, exporter.endpoint.epoch) for exporter in exporters]
    host.tell(MeetExporters([ranks, []]))
    eventually(lambda: list(importer.endpoint.stats().peers) == [exporters[1].endpoint.address])


def test_nonsense_from_the_host_is_dropped_and_counted(cluster: Cluster, host: Host) -> None:
    rank = cluster.rank(report_to=host.address)
    host.hear(RankReady)
    for frames in ([b"\xc1"], [b"one", b"two"], [msgspec.msgpack.encode({"type": "drop_exports"})]):
        host.socket.send_multipart([host.ranks[0], *frames])
    eventually(lambda: rank.endpoint.stats().bad_frames == 3)


def test_a_host_that_reads_nothing_does_not_stop_the_rank(cluster: Cluster, directory: Path) -> None:
    exporter, importer = cluster.rank(report_to=f"ipc://{directory}/no-host"), cluster.rank()
    exporter.export("t", [1, 2], 8)
    importer.import_("t", exporter, [7, 8], num_tokens=8)
    assert importer.closed_import().outcome == "loaded"
