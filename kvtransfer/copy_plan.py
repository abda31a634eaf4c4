"""From block ids to byte ranges: what to copy from where to where, in as few pieces as the memory allows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import Region
from kvtransfer.region_runs import Regions

Addresses = NDArray[np.uint64]


@dataclass(frozen=True)
class CopyPlan:
    """Byte ranges; entry `i` copies `lengths[i]` bytes from `sources[i]` to `targets[i]`. No entry is empty."""

    sources: Addresses  # [piece]
    targets: Addresses  # [piece]
    lengths: Addresses  # [piece], bytes

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)


def plan_copy(
    source_ids: Sequence[int], target_ids: Sequence[int], sources: Sequence[Region], targets: Sequence[Region]
) -> CopyPlan:
    """Copy block `source_ids[i]` of every source region to block `target_ids[i]` of the target region beside it."""
    if len(source_ids) != len(target_ids) or len(sources) != len(targets):
        raise ValueError(
            f"A copy needs as many sources as targets: {len(source_ids)} blocks to {len(target_ids)}, "
            f"{len(sources)} regions to {len(targets)}."
        )
    there, here = Regions.of(sources), Regions.of(targets)
    lengths = _run_lengths(len(source_ids), there)
    return _merged(_run_addresses(source_ids, there), _run_addresses(target_ids, here), lengths)


def plan_gather(block_ids: Sequence[int], regions: Sequence[Region], buffer_address: int) -> CopyPlan:
    """Copy the blocks into one buffer, region by region, block by block and run by run, without gaps."""
    ours = Regions.of(regions)
    lengths = _run_lengths(len(block_ids), ours)
    return _merged(_run_addresses(block_ids, ours), _packed_addresses(buffer_address, lengths), lengths)


def plan_scatter(block_ids: Sequence[int], regions: Sequence[Region], buffer_address: int) -> CopyPlan:
    """The reverse of `plan_gather`."""
    ours = Regions.of(regions)
    lengths = _run_lengths(len(block_ids), ours)
    return _merged(_packed_addresses(buffer_address, lengths), _run_addresses(block_ids, ours), lengths)


def payload_bytes(num_blocks: int, regions: Sequence[Region]) -> int:
    """Size of the buffer that `plan_gather` fills."""
    return num_blocks * Regions.of(regions).bytes_per_block


def _run_lengths(num_blocks: int, regions: Regions) -> Addresses:
    return np.repeat(regions.run_bytes, num_blocks * regions.runs_per_block)


def _run_addresses(block_ids: Sequence[int], regions: Regions) -> Addresses:
    """[region, block, run], flat."""
    return regions.run_addresses(np.asarray(block_ids, dtype=np.uint64))


def _packed_addresses(buffer_address: int, lengths: Addresses) -> Addresses:
    ends = np.cumsum(lengths, dtype=np.uint64)
    return ends - lengths + np.uint64(buffer_address)


def _merged(sources: Addresses, targets: Addresses, lengths: Addresses) -> CopyPlan:
    """Join entries that touch their successor on both sides."""
    if len(lengths) == 0:
        return CopyPlan(sources, targets, lengths)
    touches = (sources[:-1] + lengths[:-1] == sources[1:]) & (targets[:-1] + lengths[:-1] == targets[1:])
    first = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    return CopyPlan(sources[first], targets[first], np.add.reduceat(lengths, first))
