"""The copy kernel's own source, compiled for the CPU, and what feeds it, on a fake GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.copy_plan import CopyPlan
from kvtransfer.gpu import copy_kernel
from kvtransfer.gpu.copy_kernel import KERNEL, NUM_SLOTS, TILE_BYTES, PieceCopier, wait_for
from kvtransfer.gpu.device import CudaDevice, CudaUnusable
from tests.unit.kvtransfer.fake_cuda import FakeMachine, FakeProcess

# Every thread of every block, one after the other: the kernel has no barriers.
HOST_PROGRAM = """
struct uint4 { unsigned int x, y, z, w; };
struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define __global__
%s
extern "C" void run(unsigned int num_blocks, unsigned int num_threads, unsigned long long list, unsigned int num_pieces,
                    unsigned int num_tiles)
{
    gridDim.x = num_blocks, blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < num_threads; ++threadIdx.x)
            copy_pieces(list, num_pieces, num_tiles);
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the kernel for the CPU with")
    directory: Path = tmp_path_factory.mktemp("kernel")
    (directory / "kernel.cpp").write_text(HOST_PROGRAM % KERNEL)
    library = directory / "kernel.so"
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    subprocess.run([compiler, *flags, "-o", library, directory / "kernel.cpp"], check=True, timeout=60)
    function = ctypes.CDLL(str(library)).run
    function.restype = None
    function.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint)
    return function


def listed(plan: CopyPlan) -> tuple[NDArray[np.uint64], int]:
    """The list as it is uploaded, and the number of tiles."""
    tiles = -(-plan.lengths.astype(np.int64) // TILE_BYTES)
    first_tiles = (np.cumsum(tiles) - tiles).astype(np.uint64)
    return np.stack([plan.sources, plan.targets, plan.lengths, first_tiles]), int(tiles.sum())


@pytest.mark.parametrize("num_blocks", [1, 7, 64])
@pytest.mark.parametrize(
    ("source_offset", "target_offset"), [(0, 0), (16, 48), (4, 8), (1, 1), (0, 3)], ids=lambda offset: str(offset)
)
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [15, 16, 17],
        [TILE_BYTES],
        [TILE_BYTES + 1, TILE_BYTES - 1, 5],
        [4096] * 40,
        [3 * TILE_BYTES + 52, 2, 65536],
    ],
    ids=lambda lengths: f"{len(lengths)} pieces of {lengths[0]}",
)
def test_the_kernel_copies_exactly_the_bytes_listed(
    run: Callable[..., None], num_blocks: int, source_offset: int, target_offset: int, lengths: list[int]
) -> None:
    generator = np.random.default_rng(len(lengths))
    gaps = 64  # keeps every piece's alignment that of the first
    room = sum(length + 2 * gaps for length in lengths) + gaps
    source = generator.integers(0, 256, room, dtype=np.uint8)
    target = generator.integers(0, 256, room, dtype=np.uint8)
    expected = target.copy()
    sources, targets, at = [], [], 0
    for length in reversed(lengths):
        at += gaps - at % 16
        from_, to = at + source_offset, at + target_offset
        expected[to : to + length] = source[from_ : from_ + length]
        sources.append(source.ctypes.data + from_)
        targets.append(target.ctypes.data + to)
        at += length + gaps
    sizes = np.array(list(reversed(lengths)), dtype=np.uint64)
    entries, num_tiles = listed(CopyPlan(np.array(sources, np.uint64), np.array(targets, np.uint64), sizes))
    run(num_blocks, 32, entries.ctypes.data, len(lengths), num_tiles)
    assert np.array_equal(target, expected)


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine()
    yield machine
    machine.close()


@pytest.fixture
def process(machine: FakeMachine) -> FakeProcess:
    return machine.process(1)


def plan_of(process: FakeProcess, num_pieces: int, length: int) -> tuple[CopyPlan, int, int]:
    """Two allocations, each piece of one to its mirror image in the other."""
    source, target = process.malloc(num_pieces * length), process.malloc(num_pieces * length)
    places = np.arange(num_pieces, dtype=np.uint64) * np.uint64(length)
    lengths = np.full(num_pieces, length, dtype=np.uint64)
    return CopyPlan(np.uint64(source) + places, np.uint64(target) + places[::-1], lengths), source, target


def test_a_long_plan_takes_several_launches(process: FakeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "LIST_PIECES", 8)
    device = CudaDevice(0, process.cupy, process.driver)
    copier = PieceCopier(device)
    num_pieces, length = 8 * (NUM_SLOTS + 3) + 1, 16
    plan, source, target = plan_of(process, num_pieces, length)
    wait_for(copier.copy(plan), 5.0)
    here, there = (process.view(at, num_pieces * length).reshape(num_pieces, length) for at in (source, target))
    assert np.array_equal(here, there[::-1])


def test_a_list_is_not_overwritten_before_the_device_has_read_it(machine: FakeMachine, process: FakeProcess) -> None:
    copier = PieceCopier(CudaDevice(0, process.cupy, process.driver))
    plans = [plan_of(process, 3, 64) for _ in range(NUM_SLOTS)]
    with machine.paused():
        events = [copier.copy(plan) for plan, _, _ in plans]
    for event in events:
        wait_for(event, 5.0)
    for _, source, target in plans:
        here, there = (process.view(at, 3 * 64).reshape(3, 64) for at in (source, target))
        assert np.array_equal(here, there[::-1])


def test_a_device_that_hangs_is_not_waited_for_for_ever(machine: FakeMachine, process: FakeProcess) -> None:
    copier = PieceCopier(CudaDevice(0, process.cupy, process.driver))
    with machine.paused(), pytest.raises(CudaUnusable, match=r"did not finish a copy within 0\.05 s"):
        wait_for(copier.copy(plan_of(process, 1, 64)[0]), 0.05)
