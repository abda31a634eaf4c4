import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.copy_plan import CopyPlan, payload_bytes, plan_copy, plan_gather, plan_scatter
from kvtransfer.layout import Region

NUM_BLOCKS = 12
MEMORY_BYTES = 4096


@st.composite
def regions(draw: st.DrawFn, run_bytes: list[int]) -> list[Region]:
    """Non-overlapping regions in a memory that starts at address 0."""
    laid_out, address = [], 0
    for length in run_bytes:
        stride = length + draw(st.sampled_from([0, 0, 3]))
        laid_out.append(Region(address, stride, length, NUM_BLOCKS))
        address += stride * NUM_BLOCKS + draw(st.sampled_from([0, 5]))
    return laid_out


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[int], list[int], list[Region], list[Region]]:
    run_bytes = draw(st.lists(st.integers(1, 16), min_size=1, max_size=4))
    blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)
    sources = draw(blocks)
    targets = draw(st.permutations(range(NUM_BLOCKS)))[: len(sources)]
    if draw(st.booleans()):
        sources, targets = sorted(sources), sorted(targets)
    return sources, targets, draw(regions(run_bytes)), draw(regions(run_bytes))


def carry_out(plan: CopyPlan, source: np.ndarray, target: np.ndarray) -> None:
    for to, at, length in zip(plan.targets.tolist(), plan.sources.tolist(), plan.lengths.tolist(), strict=True):
        target[to : to + length] = source[at : at + length]


def block_by_block(ids: list[int], laid_out: list[Region], memory: np.ndarray) -> bytes:
    return b"".join(
        memory[r.base_address + i * r.block_stride_bytes :][: r.run_bytes].tobytes() for r in laid_out for i in ids
    )


@given(copies())
def test_a_plan_moves_every_byte_of_every_block_and_no_other(
    copy: tuple[list[int], list[int], list[Region], list[Region]],
) -> None:
    source_ids, target_ids, sources, targets = copy
    source = np.random.default_rng(0).integers(1, 256, MEMORY_BYTES, dtype=np.uint8)
    target = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    plan = plan_copy(source_ids, target_ids, sources, targets)
    carry_out(plan, source, target)
    assert block_by_block(target_ids, targets, target) == block_by_block(source_ids, sources, source)
    assert plan.num_bytes == np.count_nonzero(target) == payload_bytes(len(source_ids), sources)


@given(copies())
def test_no_two_neighbours_of_a_plan_could_be_one(
    copy: tuple[list[int], list[int], list[Region], list[Region]],
) -> None:
    plan = plan_copy(*copy)
    touching = (plan.sources[:-1] + plan.lengths[:-1] == plan.sources[1:]) & (
        plan.targets[:-1] + plan.lengths[:-1] == plan.targets[1:]
    )
    assert not touching.any()
    assert (plan.lengths > 0).all()


@given(copies())
def test_scattering_undoes_gathering(copy: tuple[list[int], list[int], list[Region], list[Region]]) -> None:
    source_ids, target_ids, sources, targets = copy
    source = np.random.default_rng(0).integers(1, 256, MEMORY_BYTES, dtype=np.uint8)
    buffer = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    target = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    carry_out(plan_gather(source_ids, sources, 0), source, buffer)
    assert buffer[: payload_bytes(len(source_ids), sources)].tobytes() == block_by_block(source_ids, sources, source)
    carry_out(plan_scatter(target_ids, targets, 0), buffer, target)
    assert block_by_block(target_ids, targets, target) == block_by_block(source_ids, sources, source)


def test_consecutive_blocks_without_gaps_are_one_piece() -> None:
    region = Region(1 << 40, 100, 100, 1000)
    plan = plan_copy(range(10, 60), range(500, 550), [region], [region])
    assert len(plan) == 1
    assert plan.lengths.tolist() == [5000]


def test_a_copy_between_unequal_numbers_of_blocks_is_refused() -> None:
    region = Region(0, 100, 100, 10)
    with pytest.raises(ValueError, match="2 blocks to 1"):
        plan_copy([1, 2], [1], [region], [region])
