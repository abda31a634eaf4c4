"""Regions of consecutive layers, with what every copy of their blocks needs of them computed once.

A model of 80 layers has 160 regions, and a transfer makes hundreds of copies of the same ones.
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import Region


class Regions(tuple[Region, ...]):
    """In one row, as a copy goes through them."""

    @classmethod
    def of(cls, regions: Iterable[Region]) -> "Regions":
        """The same, if they are such a row already."""
        return regions if isinstance(regions, cls) else cls(regions)

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of one block, or unit, in all of them."""
        return sum(region.bytes_per_block for region in self)

    def run_lengths(self, num_blocks: int) -> NDArray[np.uint64]:
        """Bytes of every run of so many blocks, or units: [region, block, run], flat."""
        return np.repeat(self._run_bytes, num_blocks * self._runs_per_block)

    def run_addresses(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Of every run of these blocks, or units, in the same order."""
        ids = np.asarray(block_ids, dtype=np.uint64)  # [block]
        if not self._has_one_run_per_block:
            return np.concatenate([region.addresses(ids).ravel() for region in self])
        return (self._first_runs[:, None] + self._strides[:, None] * ids[None, :]).ravel()

    @cached_property
    def _run_bytes(self) -> NDArray[np.uint64]:
        return np.array([region.run_bytes for region in self], dtype=np.uint64)  # [region]

    @cached_property
    def _runs_per_block(self) -> NDArray[np.intp]:
        return np.array([len(region.run_offsets) for region in self], dtype=np.intp)  # [region]

    @cached_property
    def _has_one_run_per_block(self) -> bool:
        return all(region.units_per_block == 1 and len(region.run_offsets) == 1 for region in self)

    @cached_property
    def _first_runs(self) -> NDArray[np.uint64]:
        return np.array([region.base_address + region.run_offsets[0] for region in self], dtype=np.uint64)

    @cached_property
    def _strides(self) -> NDArray[np.uint64]:
        return np.array([region.block_stride_bytes for region in self], dtype=np.uint64)


class LayerRegions(tuple[tuple[Region, ...], ...]):
    """By layer."""

    def run(self, first_layer: int, num_layers: int) -> Regions:
        """Those of some consecutive layers. A peer asks for few different runs, again and again."""
        found = self._runs.get((first_layer, num_layers))
        if found is None:
            found = Regions(itertools.chain.from_iterable(self[first_layer : first_layer + num_layers]))
            if len(self._runs) >= 4 * len(self):
                self._runs.clear()  # whoever asks for all there are gets no memory for it
            self._runs[first_layer, num_layers] = found
        return found

    @cached_property
    def largest_bytes(self) -> int:
        """Of one block, or unit, in one layer."""
        return max((sum(region.bytes_per_block for region in layer) for layer in self), default=0)

    @cached_property
    def _runs(self) -> dict[tuple[int, int], Regions]:
        return {}
