"""When the engine's computation is really in memory: at once on a CPU, some time after the call on a GPU.

The engine's thread returns from a forward pass when it has put the kernels into a stream. Two things must wait for
them, without that thread waiting: announcing blocks that they write, and letting another stream write into blocks that
they, or kernels before them, may still be using.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from kvtransfer.gpu.device import CudaDevice
from kvtransfer.gpu.device_thread import DeviceThread

_STEP_WITHIN_S = 600.0
"""A forward pass that takes longer counts as hung."""


class ComputeFence(Protocol):
    def when_computed(self, call: Callable[[], None]) -> None:
        """Call `call`, from any thread, once all that the engine's thread has started until now is in memory. Calls
        happen in the order in which they were asked for. Used by the engine's thread only, and never blocks it.
        """


class NoFence:
    """A CPU's forward pass returns when it is done."""

    def when_computed(self, call: Callable[[], None]) -> None:
        call()


class CudaFence:
    """Records an event on the engine's compute stream; the device's thread calls when it has completed."""

    def __init__(self, device: CudaDevice, thread: DeviceThread, compute_stream: Callable[[], int]) -> None:
        """`compute_stream` names the engine thread's current stream, as a CUDA handle."""
        self._device = device
        self._thread = thread
        self._compute_stream = compute_stream

    def when_computed(self, call: Callable[[], None]) -> None:
        event = self._device.record(self._device.foreign_stream(self._compute_stream()))

        def computed(reason: str) -> None:
            if reason:
                raise RuntimeError(f"The engine's forward pass did not end within {_STEP_WITHIN_S:g} s: {reason}.")
            call()

        self._thread.post(lambda: self._thread.when_done(event, computed, _STEP_WITHIN_S))


class FencedCalls:
    """Calls about transfers that wait for a fence, and can be called off until they are made."""

    def __init__(self, fence: ComputeFence) -> None:
        self._fence = fence
        self._lock = threading.Lock()
        self._pending: dict[str, set[int]] = {}  # by transfer
        self._last = 0

    def call(self, transfer_id: str, call: Callable[[], None]) -> None:
        """Make it when what has been started until now is in memory."""
        with self._lock:
            self._last += 1
            number = self._last
            self._pending.setdefault(transfer_id, set()).add(number)

        def computed() -> None:
            with self._lock:  # so that it either comes before whatever follows a `drop`, or not at all
                numbers = self._pending.get(transfer_id, set())
                if number not in numbers:
                    return
                numbers.discard(number)
                if not numbers:
                    del self._pending[transfer_id]
                call()

        self._fence.when_computed(computed)

    def drop(self, transfer_id: str) -> None:
        """Those not made yet are not to be made any more."""
        with self._lock:
            self._pending.pop(transfer_id, None)
