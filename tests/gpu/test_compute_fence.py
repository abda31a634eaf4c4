"""The fence behind real kernels."""

import threading
from typing import Any

import numpy as np

from kvtransfer.compute_fence import CudaFence
from kvtransfer.gpu.device import CudaDevice
from kvtransfer.gpu.device_thread import DeviceThread


def test_a_fenced_call_sees_what_was_computed_before_it(cupy: Any, device: CudaDevice) -> None:
    thread = DeviceThread("kv-gpu-test", device, lambda: None)
    stream, reader = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    fence = CudaFence(device, thread, lambda: int(stream.ptr))
    matrix = cupy.ones((4096, 4096), dtype=np.float32)
    result = cupy.zeros(1, dtype=np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    seen: list[float] = []
    was_called = threading.Event()

    def computed() -> None:
        with reader:
            seen.append(float(result.get(stream=reader)[0]))
        was_called.set()

    with stream:
        for _ in range(20):
            matrix = matrix @ matrix / np.float32(4096)
        result[0] = matrix[0, 0] + 4
    fence.when_computed(computed)
    assert was_called.wait(30)
    assert seen == [5.0]
    assert thread.error is None
    assert thread.close(timeout_s=5)
