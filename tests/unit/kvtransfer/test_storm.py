"""Many transfers, few of which end well by themselves: nothing is lost, mixed up, written late or left over."""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.kvtransfer.rank_pair import eventually
from tests.unit.kvtransfer.storm import MARK, MAY_END, NUM_BLOCKS, Storm


@pytest.fixture
def storm(directory: Path, link: str) -> Iterator[Storm]:
    made = Storm(directory, link, seed=11)
    yield made
    made.close()


def assert_each_ended_once(storm: Storm) -> Counter[str]:
    """In a way that fits what was done to it; returns the numbers of outcomes."""
    for transfer in storm.transfers.values():
        (closed,) = transfer.closed
        exports = storm.export_outcomes.get(transfer.transfer_id, [])
        assert len(exports) == (transfer.fate != "never exported"), transfer
        if transfer.is_touched:
            continue
        assert closed.failure_kind in MAY_END[transfer.fate].get(closed.outcome, ()), (transfer, closed)
        if transfer.fate in ("plain", "cached"):
            assert exports == ["released"], transfer
        if transfer.fate == "cached":
            assert closed.bytes_moved == 0
    return Counter(transfer.closed[0].outcome for transfer in storm.transfers.values())


def assert_nothing_is_left(storm: Storm) -> None:
    for life in (storm.exporter, storm.importer):
        assert len(life.pool.free) == NUM_BLOCKS
        assert life is storm.exporter or life.is_filled(life.pool.free, MARK), "written after an import had closed"
        exporter, importer = life.endpoint._loop.exporter, life.endpoint._loop.importer
        eventually(lambda importer=importer: not importer.outbox)
        left = [exporter._exports, exporter._waiting, exporter._fetches, exporter._reasons]
        left += [importer._imports, importer._exporters._peer_of, importer._copying]
        left += [exporter.checks._under_way, importer.checks._wanted, importer.checks._under_way]
        for peer in importer._exporters._peers.values():
            left += [peer.imports, peer.abandoned, peer.with_work, peer.fetches]
        assert not any(left)


def usage() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def test_two_hundred_transfers_at_once_end_as_they_must(storm: Storm) -> None:
    """One in ten aborted, one in twenty failing."""
    storm.run(200)
    assert storm.most_open > 80
    outcomes = assert_each_ended_once(storm)
    assert outcomes["loaded"] > 160
    assert min(outcomes["recompute"], outcomes["cancelled"]) > 0
    assert_nothing_is_left(storm)


def test_two_hundred_transfers_at_once_survive_three_restarts_of_their_ranks(storm: Storm) -> None:
    storm.run(20, ("exporter", "importer"))
    storm.run(20)  # everything that is made once is made now
    time.sleep(0.1)
    before = usage()
    storm.run(200, ("exporter", "importer", "exporter"))
    assert storm.most_open > 60
    storm.run(50)
    assert assert_each_ended_once(storm)["loaded"] > 50
    assert_nothing_is_left(storm)
    eventually(lambda: all(now <= then for now, then in zip(usage(), before, strict=True)))  # ZMQ takes its time


def test_twenty_restarts_on_one_address_under_load(storm: Storm) -> None:
    storm.run(120, ("exporter", "importer") * 10, stagger=30)
    assert assert_each_ended_once(storm)["loaded"]
    assert_nothing_is_left(storm)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_memory_stays_flat(directory: Path, link: str) -> None:
    storm = Storm(directory, link, seed=5)
    resident: list[int] = []
    for _ in range(30):
        storm.run(200, ("exporter", "importer"), stagger=30)
        assert_each_ended_once(storm)
        storm.transfers.clear()
        storm.export_outcomes.clear()
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    storm.close()
    assert max(resident[15:]) - resident[14] < 4 << 20, [size >> 10 for size in resident]
