"""Link `zmq`: blocks gathered into one message at the exporter, scattered from it at the importer.

No cache block is ever referenced by a message, so ZMQ's own threads never read one that may since have been freed.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtransfer.copy_plan import Addresses, CopyPlan, payload_bytes, plan_gather, plan_scatter
from kvtransfer.layout import Region

_RELEASE_GIL_FROM_BYTES = 256 << 10
"""Giving the GIL up costs a wait for it afterwards: not worth it for the few microseconds of a small piece."""
_TOGETHER_BELOW_BYTES = 4096
_TOGETHER_FROM_PIECES = 16
"""Equal small pieces, as of single heads or tokens, are moved by one call to numpy: up to ten times as fast as one by
one."""

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.restype = None
_libc.free.argtypes = (ctypes.c_void_p,)

_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_without_gil = ctypes.CDLL(None).memmove
for _function in (_memmove_with_gil, _memmove_without_gil):
    _function.restype = ctypes.c_void_p
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


_LARGEST_DYNAMIC_THRESHOLD = 32 << 20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64-bit machines."""


def keep_freed_messages() -> None:
    """Let the allocator keep the memory of a message that was read for the next one.

    glibc returns freed memory to the kernel in steps that grow with the largest block that it mapped apart and freed
    again; a process that never had a large one returns every message, and faults its pages in again for the next. This
    frees one such block. Up to 64 MiB of freed memory may stay with the process from then on.
    """
    _libc.free(_libc.malloc(_LARGEST_DYNAMIC_THRESHOLD - (64 << 10)))


class BlockMemory(Protocol):
    """Where the blocks lie. Used by one thread."""

    is_addressable: bool
    """This process can read the blocks where they lie."""

    def gather(self, block_ids: Sequence[int], regions: Sequence[Region]) -> memoryview:
        """The blocks' bytes, valid until the next call."""

    def gather_into(self, buffer: NDArray[np.uint8], block_ids: Sequence[int], regions: Sequence[Region]) -> None:
        """Copy the blocks' bytes there, which takes all of `buffer`."""

    def scatter(self, payload: memoryview, block_ids: Sequence[int], regions: Sequence[Region]) -> None:
        """The reverse. Raises ValueError when the payload has not the size that these blocks take."""

    def close(self) -> None:
        """Nothing is moved any more."""


class HostMemory:
    """CPU memory."""

    is_addressable = True

    def __init__(self) -> None:
        self._scratch: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def gather(self, block_ids: Sequence[int], regions: Sequence[Region]) -> memoryview:
        num_bytes = payload_bytes(len(block_ids), regions)
        if num_bytes > self._scratch.nbytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return gather(block_ids, regions, self._scratch)

    def gather_into(self, buffer: NDArray[np.uint8], block_ids: Sequence[int], regions: Sequence[Region]) -> None:
        gather(block_ids, regions, buffer)

    def scatter(self, payload: memoryview, block_ids: Sequence[int], regions: Sequence[Region]) -> None:
        scatter(payload, block_ids, regions)

    def close(self) -> None:
        """Nothing is held but ordinary memory."""


def gather(block_ids: Sequence[int], regions: Sequence[Region], buffer: NDArray[np.uint8]) -> memoryview:
    """Copy the blocks into `buffer`; returns the part that was filled. Raises ValueError when it is too small."""
    num_bytes = payload_bytes(len(block_ids), regions)
    if num_bytes > buffer.nbytes:
        raise ValueError(f"{num_bytes} bytes for a buffer of {buffer.nbytes}")
    _move(plan_gather(block_ids, regions, buffer.ctypes.data))
    return buffer.data[:num_bytes]


def scatter(payload: memoryview, block_ids: Sequence[int], regions: Sequence[Region]) -> None:
    """The reverse. Raises ValueError when the payload has not the size that these blocks take."""
    expected = payload_bytes(len(block_ids), regions)
    if len(payload) != expected:
        raise ValueError(f"a payload of {len(payload)} bytes for blocks of {expected}")
    _move(plan_scatter(block_ids, regions, np.frombuffer(payload, dtype=np.uint8).ctypes.data))


def _move(plan: CopyPlan) -> None:
    if len(plan) >= _TOGETHER_FROM_PIECES:
        length = int(plan.lengths[0])
        if length < _TOGETHER_BELOW_BYTES and (plan.lengths == plan.lengths[0]).all():
            targets, to = _pieces(plan.targets, length)
            sources, at = _pieces(plan.sources, length)
            targets[to] = sources[at]
            return
    pieces = zip(plan.targets.tolist(), plan.sources.tolist(), plan.lengths.tolist(), strict=True)
    for target, source, length in pieces:
        move = _memmove_without_gil if length >= _RELEASE_GIL_FROM_BYTES else _memmove_with_gil
        move(target, source, length)


def _pieces(addresses: Addresses, length: int) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
    """Memory as an array of which entry `i` is the piece that starts at byte `i`, and the entries at `addresses`.

    Nothing is touched but what is indexed, so it does not matter what else lies in between.
    """
    lowest = int(addresses.min())
    span = int(addresses.max()) - lowest + length
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(lowest))
    windows = as_strided(memory, shape=(span - length + 1, length), strides=(1, 1))
    return windows, (addresses - np.uint64(lowest)).astype(np.intp)
