"""The copy kernel on a device: exact against numpy, and its speed against cudaMemcpy's."""

import time
from typing import Any

import numpy as np
import pytest

from kvtransfer.copy_plan import plan_copy, plan_gather, plan_scatter
from kvtransfer.gpu.copy_kernel import PieceCopier, wait_for
from kvtransfer.gpu.device import CudaDevice
from kvtransfer.layout import Region
from tests.gpu.speed import ceiling_gb_per_s, report

NUM_BLOCKS = 64


@pytest.fixture
def copier(device: CudaDevice) -> PieceCopier:
    device.use()
    return PieceCopier(device)


def regions_of(array: Any, num_runs: int) -> list[Region]:
    """`array`: [block, run, element]; one region per run."""
    stride, run = array.strides[0], array.strides[1]
    return [Region(array.data.ptr + number * run, stride, run, len(array)) for number in range(num_runs)]


@pytest.mark.parametrize("num_elements", [8, 24, 1000, 8192, 40_000], ids=lambda count: f"{4 * count} bytes")
@pytest.mark.parametrize("offset", [0, 1, 3], ids=lambda offset: f"{4 * offset} bytes off")
def test_gather_and_scatter_are_numpys(cupy: Any, copier: PieceCopier, num_elements: int, offset: int) -> None:
    generator = np.random.default_rng(num_elements)
    ids = generator.permutation(NUM_BLOCKS)[:37].tolist()
    array = cupy.asarray(generator.standard_normal((NUM_BLOCKS, 2, num_elements), dtype=np.float32))
    buffer = cupy.zeros(offset + 37 * 2 * num_elements, dtype=np.float32)
    back = cupy.zeros_like(array)
    cupy.cuda.runtime.deviceSynchronize()
    at = buffer.data.ptr + 4 * offset
    wait_for(copier.copy(plan_gather(ids, regions_of(array, 2), at)), 10.0)
    reference = np.concatenate([cupy.asnumpy(array)[ids, run].ravel() for run in range(2)])
    assert np.array_equal(cupy.asnumpy(buffer)[offset:], reference)
    wait_for(copier.copy(plan_scatter(ids, regions_of(back, 2), at)), 10.0)
    expected = np.zeros_like(cupy.asnumpy(array))
    expected[ids] = cupy.asnumpy(array)[ids]
    assert np.array_equal(cupy.asnumpy(back), expected)


def test_single_bytes_are_copied_exactly(cupy: Any, copier: PieceCopier) -> None:
    array = cupy.asarray(np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, 1, 333), dtype=np.uint8))
    back = cupy.zeros_like(array)
    cupy.cuda.runtime.deviceSynchronize()
    ids = list(range(NUM_BLOCKS))
    wait_for(copier.copy(plan_copy(ids, ids[::-1], regions_of(array, 1), regions_of(back, 1))), 10.0)
    assert np.array_equal(cupy.asnumpy(back), cupy.asnumpy(array)[::-1])


@pytest.mark.parametrize("run_kib", [16, 64, 1024])
def test_blocks_are_copied_at_a_good_part_of_cudamemcpys_speed(cupy: Any, copier: PieceCopier, run_kib: int) -> None:
    num_bytes = 256 << 20
    num_blocks = num_bytes // (run_kib << 10)
    source = cupy.zeros((num_blocks, 1, run_kib << 10), dtype=np.uint8)
    target = cupy.zeros_like(source)
    cupy.cuda.runtime.deviceSynchronize()
    ids = np.random.default_rng(0).permutation(num_blocks).tolist()
    plan = plan_copy(ids, ids[::-1], regions_of(source, 1), regions_of(target, 1))
    best_s = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        wait_for(copier.copy(plan), 10.0)
        best_s = min(best_s, time.perf_counter() - started_s)
    ceiling = ceiling_gb_per_s(cupy, num_bytes)
    achieved = num_bytes / best_s / 1e9
    report(f"kernel, pieces of {run_kib} KiB on one device", achieved, ceiling)
    assert achieved > 0.25 * ceiling, "far below what 64 thread blocks should reach"
