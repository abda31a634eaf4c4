"""Link `zmq`: blocks gathered into one buffer per message at the exporter, scattered from it at the importer.

No cache block is ever referenced by a message, so ZMQ's own threads never read one that may since have been freed.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq
from numpy.typing import NDArray

from kvtransfer.copy_plan import CopyPlan, payload_bytes, plan_gather, plan_scatter
from kvtransfer.layout import Region

_RELEASE_GIL_FROM_BYTES = 256 << 10
"""Giving the GIL up costs a wait for it afterwards: not worth it for the few microseconds of a small piece."""

_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_without_gil = ctypes.CDLL(None).memmove
for _function in (_memmove_with_gil, _memmove_without_gil):
    _function.restype = ctypes.c_void_p
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def gather(block_ids: Sequence[int], regions: Sequence[Region], buffer: NDArray[np.uint8]) -> memoryview:
    """Copy the blocks into `buffer`; returns the part that was filled."""
    _move(plan_gather(block_ids, regions, buffer.ctypes.data))
    return buffer.data[: payload_bytes(len(block_ids), regions)]


def scatter(payload: memoryview, block_ids: Sequence[int], regions: Sequence[Region]) -> None:
    """The reverse. Raises ValueError when the payload has not the size that these blocks take."""
    expected = payload_bytes(len(block_ids), regions)
    if len(payload) != expected:
        raise ValueError(f"a payload of {len(payload)} bytes for blocks of {expected}")
    _move(plan_scatter(block_ids, regions, np.frombuffer(payload, dtype=np.uint8).ctypes.data))


def _move(plan: CopyPlan) -> None:
    pieces = zip(plan.targets.tolist(), plan.sources.tolist(), plan.lengths.tolist(), strict=True)
    for target, source, length in pieces:
        move = _memmove_without_gil if length >= _RELEASE_GIL_FROM_BYTES else _memmove_with_gil
        move(target, source, length)


@dataclass
class StagingRing:
    """Send buffers, used again once ZMQ is done with them: a fresh one would cost a page fault per 4 KiB."""

    buffer_bytes: int
    """Smallest size to allocate."""
    max_idle: int
    _sending: list[tuple[NDArray[np.uint8], zmq.MessageTracker]] = field(default_factory=list)
    _idle: list[NDArray[np.uint8]] = field(default_factory=list)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """A buffer of at least that size, for `sent` or `put_back`."""
        for buffer, tracker in self._sending:
            if tracker.done:
                self.put_back(buffer)
        self._sending = [sending for sending in self._sending if not sending[1].done]
        for index, buffer in enumerate(self._idle):
            if buffer.nbytes >= num_bytes:
                return self._idle.pop(index)
        return np.empty(max(num_bytes, self.buffer_bytes), dtype=np.uint8)

    def sent(self, buffer: NDArray[np.uint8], tracker: zmq.MessageTracker) -> None:
        """ZMQ reads the buffer until `tracker` says otherwise."""
        self._sending.append((buffer, tracker))

    def put_back(self, buffer: NDArray[np.uint8]) -> None:
        self._idle = [buffer, *self._idle][: self.max_idle]
