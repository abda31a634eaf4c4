"""How fast this device copies, and how that is printed."""

import sys
import time
from typing import Any


def ceiling_gb_per_s(cupy: Any, num_bytes: int, source_device: int = 0) -> float:
    """Best of five plain cudaMemcpy of that size onto device 0, in 1e9 bytes/s."""
    with cupy.cuda.Device(source_device):
        source = cupy.cuda.runtime.malloc(num_bytes)
    target = cupy.cuda.runtime.malloc(num_bytes)
    stream = cupy.cuda.Stream(non_blocking=True)
    best_s = float("inf")
    for _ in range(5):
        stream.synchronize()
        started_s = time.perf_counter()
        cupy.cuda.runtime.memcpyAsync(target, source, num_bytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)
        stream.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    cupy.cuda.runtime.free(target)
    with cupy.cuda.Device(source_device):
        cupy.cuda.runtime.free(source)
    return num_bytes / best_s / 1e9


def report(what: str, gb_per_s: float, ceiling: float) -> None:
    sys.stdout.write(f"\n  {what}: {gb_per_s:.1f} GB/s, cudaMemcpy {ceiling:.1f} GB/s ({gb_per_s / ceiling:.0%})\n")
