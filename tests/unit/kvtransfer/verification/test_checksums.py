import threading
import time
import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from kvtransfer.gpu.device import CudaUnusable
from kvtransfer.layout import CacheMap, Region, probe
from kvtransfer.links.zmq_frames import BlockMemory, HostMemory
from kvtransfer.resharding.shares import share
from kvtransfer.verification.check_thread import CheckJob, CheckThread
from kvtransfer.verification.checksums import Interrupted, checksums
from tests.unit.kvtransfer.rank_pair import FACTS, NUM_BLOCKS, eventually, make_cache
from tests.unit.kvtransfer.resharding.sharded_cache import LAYOUTS, Model, RankCache


def cache_map(shape: str = "block first") -> CacheMap:
    return probe(make_cache(0, shape), NUM_BLOCKS, FACTS)


@pytest.fixture(params=[1, 1 << 20], ids=["in place", "gathered"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.verification.checksums._IN_PLACE_FROM_BYTES", request.param)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("shape", ["block first", "K and V apart"])
@pytest.mark.parametrize("max_bytes", [1, 300, 1000, 1 << 20])
def test_a_checksum_covers_all_layers_of_a_block(shape: str, max_bytes: int) -> None:
    cache = make_cache(0, shape)
    layers = probe(cache, NUM_BLOCKS, FACTS).layers
    blocks = [5, 60, 6]
    expected = [zlib.crc32(b"".join(layer[block].tobytes() for layer in cache.values())) for block in blocks]
    assert checksums(HostMemory(), blocks, layers, max_bytes) == expected


@pytest.mark.usefixtures("how")
def test_every_byte_counts() -> None:
    cache = make_cache(0)
    layers = probe(cache, NUM_BLOCKS, FACTS).layers
    before = checksums(HostMemory(), [3, 4], layers, 1 << 20)
    for layer in cache.values():
        flat = layer[3].reshape(-1).view(np.uint8)
        for position in range(0, len(flat), 17):
            flat[position] ^= 1
            changed = checksums(HostMemory(), [3, 4], layers, 1 << 20)
            assert changed[0] != before[0]
            assert changed[1] == before[1]
            flat[position] ^= 1
    assert checksums(HostMemory(), [3, 4], layers, 1 << 20) == before


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("theirs", "ours"), [((1, 16), (2, 16)), ((2, 16), (1, 16)), ((1, 64), (2, 32)), ((2, 8), (1, 16))]
)
def test_both_sides_of_a_pair_come_to_the_same_checksums(
    layout: str, theirs: tuple[int, int], ours: tuple[int, int]
) -> None:
    """Pairs of (ranks, block size): each rank has other heads, strides and blocks."""
    model = Model(total_heads=4, head_size=8)
    prompt = model.prompt(128)
    exporter = RankCache(model, 0, *theirs, layout, num_blocks=24)
    importer = RankCache(model, 0, *ours, layout, num_blocks=24)
    chance = np.random.default_rng(1)
    ids = [chance.permutation(24)[: 128 // side.block_size].tolist() for side in (exporter, importer)]
    for side, blocks in zip((exporter, importer), ids, strict=True):
        side.write(prompt, blocks)
    their_form, our_form = exporter.map.layout.form, importer.map.layout.form
    assert their_form
    assert our_form
    common = share(their_form, 0, our_form, 0)
    units = [
        [block * per_block + unit for block in blocks for unit in range(per_block)]
        for blocks, per_block in zip(
            ids, (common.units.exporter_per_block, common.units.importer_per_block), strict=True
        )
    ]
    there = checksums(HostMemory(), units[0], exporter.map.cut(common.exporter), 5000)
    here = checksums(HostMemory(), units[1], importer.map.cut(common.importer), 3000)
    assert there == here
    assert len(set(there)) == len(there)


def test_it_makes_no_difference_whether_runs_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = RankCache(Model(total_heads=4, head_size=64), 0, 1, 16, "LHBNC").map.layers
    gathered = checksums(HostMemory(), [3, 1], layers, 1 << 16)
    monkeypatch.setattr("kvtransfer.verification.checksums._IN_PLACE_FROM_BYTES", 1)
    assert checksums(HostMemory(), [3, 1], layers, 1 << 16) == gathered


def test_computing_can_be_interrupted() -> None:
    with pytest.raises(Interrupted):
        checksums(HostMemory(), [1, 2], cache_map().layers, 100, is_interrupted=lambda: True)


class Memory(HostMemory):
    """One that can be held up."""

    is_addressable = False

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.open = threading.Event(), threading.Event()

    def gather(self, block_ids: Sequence[int], regions: Sequence[Region]) -> memoryview:
        self.arrived.set()
        assert self.open.wait(5)
        return super().gather(block_ids, regions)


def job(number: int) -> CheckJob:
    return CheckJob(None, number, (1, 2), cache_map().layers)


def test_the_thread_starts_with_its_first_job_and_keeps_their_order() -> None:
    before = threading.active_count()
    thread = CheckThread("kv-check-test", HostMemory, 1000, lambda: None)
    assert threading.active_count() == before
    for number in range(3):
        thread.submit(job(number))
    eventually(lambda: len(thread.results) == 3)
    assert [result.job.check_id for result in thread.results] == [0, 1, 2]
    assert thread.close(1.0)
    assert threading.active_count() == before


def test_a_thread_without_jobs_closes() -> None:
    assert CheckThread("kv-check-test", HostMemory, 1000, lambda: None).close(1.0)


def test_closing_interrupts_a_job() -> None:
    memory = Memory()
    thread = CheckThread("kv-check-test", lambda: memory, 100, lambda: None)
    thread.submit(job(0))
    assert memory.arrived.wait(5)
    threading.Timer(0.05, memory.open.set).start()
    started_s = time.monotonic()
    assert thread.close(5.0)
    assert time.monotonic() - started_s < 4
    assert not thread.results
    assert thread.error is None


def test_memory_that_cannot_be_used_is_an_answer_and_a_bug_is_an_error() -> None:
    def no_memory() -> BlockMemory:
        raise CudaUnusable("no pinned memory is left")

    thread = CheckThread("kv-check-test", no_memory, 1000, lambda: None)
    thread.submit(job(0))
    eventually(lambda: thread.results)
    assert (thread.results[0].values, thread.results[0].reason) == ([], "no pinned memory is left")
    assert thread.close(1.0)
    broken = CheckThread("kv-check-test", lambda: None, 1000, lambda: None)  # type: ignore[arg-type, return-value]
    broken.submit(job(0))
    eventually(lambda: broken.error)
    assert broken.close(1.0)
