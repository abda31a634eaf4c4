"""Link `zmq` for caches on a GPU: the kernel gathers into pinned host memory and scatters from it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.copy_plan import payload_bytes, plan_gather, plan_scatter
from kvtransfer.gpu.copy_kernel import PieceCopier, wait_for
from kvtransfer.gpu.device import CudaDevice
from kvtransfer.layout import Region

_MOVE_WITHIN_S = 10.0


class StagedMemory:
    """Used by the endpoint's thread only; each call takes the time of one chunk over PCIe. Raises CudaUnusable."""

    is_addressable = False

    def __init__(self, device: CudaDevice, max_bytes: int) -> None:
        """Takes `max_bytes` of pinned host memory, the size of the largest chunk."""
        self._device = device
        self._copier = PieceCopier(device)
        self._buffer = device.allocate_pinned(max_bytes)

    def gather(self, block_ids: Sequence[int], regions: Sequence[Region]) -> memoryview:
        """The blocks' bytes, valid until the next call."""
        self._device.use()
        num_bytes = self._reserve(payload_bytes(len(block_ids), regions))
        wait_for(self._copier.copy(plan_gather(block_ids, regions, self._buffer.address)), _MOVE_WITHIN_S)
        return self._buffer.array.data[:num_bytes]

    def gather_into(self, buffer: NDArray[np.uint8], block_ids: Sequence[int], regions: Sequence[Region]) -> None:
        """Copy the blocks' bytes there, which takes all of `buffer`."""
        buffer[:] = np.frombuffer(self.gather(block_ids, regions), dtype=np.uint8)

    def scatter(self, payload: memoryview, block_ids: Sequence[int], regions: Sequence[Region]) -> None:
        """The reverse. Raises ValueError when the payload has not the size that these blocks take."""
        expected = payload_bytes(len(block_ids), regions)
        if len(payload) != expected:
            raise ValueError(f"a payload of {len(payload)} bytes for blocks of {expected}")
        self._device.use()
        num_bytes = self._reserve(expected)
        self._buffer.array[:num_bytes] = np.frombuffer(payload, dtype=np.uint8)
        wait_for(self._copier.copy(plan_scatter(block_ids, regions, self._buffer.address)), _MOVE_WITHIN_S)

    def close(self) -> None:
        self._device.use()
        self._copier.close()

    def _reserve(self, num_bytes: int) -> int:
        if num_bytes > self._buffer.array.nbytes:
            self._buffer = self._device.allocate_pinned(num_bytes)
        return num_bytes
