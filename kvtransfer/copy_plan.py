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
    return _merged(there.run_addresses(source_ids), here.run_addresses(target_ids), there.run_lengths(len(source_ids)))


def plan_gather(block_ids: Sequence[int], regions: Sequence[Region], buffer_address: int) -> CopyPlan:
    """Copy the blocks into one buffer, region by region, block by block and run by run, without gaps."""
    ours = Regions.of(regions)
    lengths = ours.run_lengths(len(block_ids))
    return _merged(ours.run_addresses(block_ids), _packed_addresses(buffer_address, lengths), lengths)


def plan_scatter(block_ids: Sequence[int], regions: Sequence[Region], buffer_address: int) -> CopyPlan:
    """The reverse of `plan_gather`."""
    ours = Regions.of(regions)
    lengths = ours.run_lengths(len(block_ids))
    return _merged(_packed_addresses(buffer_address, lengths), ours.run_addresses(block_ids), lengths)


def payload_bytes(num_blocks: int, regions: Sequence[Region]) -> int:
    """Size of the buffer that `plan_gather` fills."""
    return num_blocks * Regions.of(regions).bytes_per_block


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
