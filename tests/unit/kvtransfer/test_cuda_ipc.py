"""The link `cuda_ipc`, and `zmq` for caches on a GPU, between endpoints on fake GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.gpu.device import CudaUnusable
from kvtransfer.layout import Region
from kvtransfer.links.cuda_ipc import share_allocations
from tests.unit.kvtransfer.gpu_pair import RUN_BYTES, GpuCluster, GpuRank, link_of
from tests.unit.kvtransfer.rank_pair import NUM_LAYERS, eventually

BLOCKS = list(range(1, 41))
OURS = list(range(60, 20, -1))
NUM_TOKENS = 4 * len(BLOCKS)


@pytest.fixture
def gpus(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCluster]:
    with GpuCluster(directory, monkeypatch).closing() as cluster:
        yield cluster


@pytest.fixture
def pair(gpus: GpuCluster) -> tuple[GpuRank, GpuRank]:
    return gpus.rank(), gpus.rank()


def test_blocks_arrive_as_they_were(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    closed = importer.closed_import()
    assert (closed.outcome, closed.link) == ("loaded", "cuda_ipc")
    assert closed.bytes_moved == len(BLOCKS) * NUM_LAYERS * 2 * RUN_BYTES
    assert importer.holds(OURS, exporter, BLOCKS)
    assert exporter.closed_export().outcome == "released"
    assert link_of(importer).startswith("cuda_ipc: both ranks are on one machine, with CUDA IPC")


def test_blocks_are_copied_while_the_prefill_goes_on(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", b"hash of the prompt", NUM_TOKENS)
    exporter.endpoint.announce("t", BLOCKS[:30], 120)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    exporter.endpoint.finish_export("t", BLOCKS, NUM_TOKENS, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds(OURS, exporter, BLOCKS)


def test_each_allocation_is_mapped_once_per_exporter(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    for name in ("t", "u", "v"):
        exporter.export(name, BLOCKS, NUM_TOKENS)
        importer.import_(name, exporter, OURS, NUM_TOKENS)
        assert importer.closed_import(name).outcome == "loaded"
    assert list(importer.process.opened.values()) == [1] * NUM_LAYERS


def test_meeting_maps_before_any_transfer(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    importer.endpoint.meet(exporter.endpoint.address, exporter.endpoint.epoch)
    eventually(lambda: len(importer.process.opened) == NUM_LAYERS)


def test_an_exporters_death_unmaps_its_memory(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", b"hash of the prompt", NUM_TOKENS)
    exporter.endpoint.announce("t", BLOCKS[:30], 120)
    importer.import_("t", exporter, OURS, NUM_TOKENS, wants_first_token=False)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    exporter.kill()
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind, len(closed.bad_block_ids)) == ("recompute", "peer_lost", len(OURS))
    eventually(lambda: not importer.process.opened)


def test_memory_stays_mapped_while_a_copy_reads_it(gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    importer.endpoint.meet(exporter.endpoint.address, exporter.endpoint.epoch)
    eventually(lambda: importer.endpoint.stats().peers)
    with gpus.machine.paused():
        exporter.export("t", BLOCKS, NUM_TOKENS)
        importer.import_("t", exporter, OURS, NUM_TOKENS, wants_first_token=False)
        eventually(lambda: any(stream.operations for stream in importer.process.streams.values()))
        exporter.kill()
        eventually(lambda: not importer.endpoint.stats().peers)
        assert not importer.has_closed(0.1), "the kernel still writes into our blocks"
        assert len(importer.process.opened) == NUM_LAYERS
    assert importer.closed_import().outcome == "recompute"
    eventually(lambda: not importer.process.opened)


def test_a_restarted_exporter_is_mapped_anew(gpus: GpuCluster) -> None:
    exporter, importer = gpus.rank(name="same"), gpus.rank()
    exporter.export("before", BLOCKS, NUM_TOKENS)
    importer.import_("before", exporter, OURS, NUM_TOKENS)
    assert importer.closed_import("before").outcome == "loaded"
    exporter.kill()
    successor = gpus.rank(name="same")
    successor.export("after", BLOCKS, NUM_TOKENS)
    importer.import_("after", successor, OURS, NUM_TOKENS)
    assert importer.closed_import("after").outcome == "loaded"
    assert importer.holds(OURS, successor, BLOCKS)
    eventually(lambda: len(importer.process.opened) == NUM_LAYERS)


@pytest.mark.parametrize(
    ("kind", "allocator", "remedy"),
    [("virtual", "CUDA virtual memory", "expandable_segments:True"), ("pool", "cudaMallocAsync", "backend:")],
)
def test_memory_that_ipc_cannot_share_takes_the_next_link_and_says_why(
    gpus: GpuCluster, kind: str, allocator: str, remedy: str
) -> None:
    exporter, importer = gpus.rank(kind=kind), gpus.rank()
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    closed = importer.closed_import()
    assert (closed.outcome, closed.link) == ("loaded", "zmq")
    assert importer.holds(OURS, exporter, BLOCKS)
    eventually(lambda: importer.endpoint.stats().peers)
    assert "cuda_ipc: the KV cache was allocated" in link_of(importer)
    assert allocator in link_of(importer)
    assert remedy in link_of(importer)
    assert "nccl: both ranks use the same GPU" in link_of(importer)


def test_a_mapping_that_fails_takes_the_next_link_and_leaves_nothing_open(
    gpus: GpuCluster, pair: tuple[GpuRank, GpuRank]
) -> None:
    exporter, importer = pair
    del exporter.process.memories[exporter.arrays[-1].address]
    importer.endpoint.meet(exporter.endpoint.address, exporter.endpoint.epoch)
    eventually(lambda: importer.endpoint.stats().peers)
    assert link_of(importer).startswith("zmq")
    assert "cuda_ipc: the exporter's GPU memory cannot be mapped" in link_of(importer)
    assert not importer.process.opened


def test_ranks_of_one_gpu_without_ipc_use_messages(gpus: GpuCluster) -> None:
    exporter, importer = gpus.rank(), gpus.rank(links=("nccl", "zmq"))
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    assert importer.closed_import().link == "zmq"
    assert importer.holds(OURS, exporter, BLOCKS)


def test_a_fault_on_the_device_ends_the_endpoint(pair: tuple[GpuRank, GpuRank]) -> None:
    exporter, importer = pair
    exporter.export("t", BLOCKS, NUM_TOKENS)
    importer.process.memories[importer.arrays[0].address].is_freed = True
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    eventually(lambda: importer.endpoint._error)
    with pytest.raises(RuntimeError, match="Restart this worker"):
        importer.endpoint.check()


def test_a_region_beyond_its_allocation_is_not_shared(gpus: GpuCluster) -> None:
    rank = gpus.rank()
    device = gpus._open_device("cuda:0")
    address = rank.process.malloc(1000)
    with pytest.raises(CudaUnusable, match="reaches beyond its allocation of 1000 bytes"):
        share_allocations(device, [Region(address, 100, 100, 11)])
    with pytest.raises(CudaUnusable, match="no CUDA allocation is known"):
        share_allocations(device, [Region(5, 100, 100, 2)])
    shared = share_allocations(device, [Region(address + 10, 100, 50, 9), Region(address + 60, 100, 50, 9)])
    assert [(it.base_address, it.num_bytes) for it in shared] == [(address, 1000)], "once, from its base"
