"""The checksum of a block: CRC-32 over what a pair of ranks shares of it, all layers, run by run.

Both sides cut a block into the same runs in the same order, whatever the heads, block sizes and strides of their caches
are, so equal bytes have equal checksums. CRC-32 finds every burst of up to 32 wrong bits, and misses one of 2**32 other
errors. zlib's gives the GIL up while it computes.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

from kvtransfer.layout import Region
from kvtransfer.links.zmq_frames import BlockMemory

Layers = Sequence[Sequence[Region]]


class Interrupted(Exception):
    """The checksums were not computed, because nobody waits for them any more."""


def checksums(
    memory: BlockMemory,
    block_ids: Sequence[int],
    layers: Layers,
    max_bytes: int,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Of each block, or unit. `max_bytes` are gathered at a time, more only where one layer of one block is larger.

    Raises Interrupted.
    """
    values = [0] * len(block_ids)
    for regions, bytes_per_block in _layer_groups(layers, max_bytes):
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
