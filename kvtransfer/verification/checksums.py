"""The checksum of a block: CRC-32 over what a pair of ranks shares of it, all layers, run by run.

Both sides cut a block into the same runs in the same order, whatever the heads, block sizes and strides of their caches
are, so equal bytes have equal checksums. CRC-32 finds every burst of up to 32 wrong bits, and misses one of 2**32 other
errors. zlib's gives the GIL up while it computes.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtransfer.layout import Region
from kvtransfer.links.zmq_frames import BlockMemory

Layers = Sequence[Sequence[Region]]

_IN_PLACE_FROM_BYTES = 1024
"""Runs shorter than this are gathered first: a call for each would cost more than the copy."""


class Interrupted(Exception):
    """The checksums were not computed, because nobody waits for them any more."""


def checksums(
    memory: BlockMemory,
    block_ids: Sequence[int],
    layers: Layers,
    max_bytes: int,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Of each block, or unit. What must be gathered is so `max_bytes` at a time, more only where one layer of one block
    is larger. Raises Interrupted.
    """
    values = [0] * len(block_ids)
    for regions, bytes_per_block in _layer_groups(layers, max_bytes):
        if memory.is_addressable and all(region.run_bytes >= _IN_PLACE_FROM_BYTES for region in regions):
            for region in regions:
                if is_interrupted():
                    raise Interrupted
                _add_in_place(values, block_ids, region)
            continue
        step = max(1, max_bytes // bytes_per_block)
        for first in range(0, len(block_ids), step):
            if is_interrupted():
                raise Interrupted
            some = block_ids[first : first + step]
            payload, offset = memory.gather(some, regions), 0
            for region in regions:
                size = region.bytes_per_block
                for position in range(first, first + len(some)):
                    values[position] = zlib.crc32(payload[offset : offset + size], values[position])
                    offset += size
    return values


def _add_in_place(values: list[int], block_ids: Sequence[int], region: Region) -> None:
    """Go on with `values`, one per block, over the runs where they lie."""
    begin, end = region.extent
    memory = memoryview((ctypes.c_uint8 * (end - begin)).from_address(begin))
    starts = region.addresses(np.asarray(block_ids, dtype=np.uint64)) - np.uint64(begin)  # [block, run]
    size = region.run_bytes
    for position, runs in enumerate(starts.tolist()):
        value = values[position]
        for start in runs:
            value = zlib.crc32(memory[start : start + size], value)
        values[position] = value


def _layer_groups(layers: Layers, max_bytes: int) -> Iterator[tuple[list[Region], int]]:
    """Regions of consecutive layers, and their bytes per block."""
    group: list[Region] = []
    group_bytes = 0
    for layer in layers:
        layer_bytes = sum(region.bytes_per_block for region in layer)
        if group and group_bytes + layer_bytes > max_bytes:
            yield group, group_bytes
            group, group_bytes = [], 0
        group += layer
        group_bytes += layer_bytes
    if group_bytes:
        yield group, group_bytes
