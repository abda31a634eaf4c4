"""CPU time of process trees, as the kernel counts it."""

import time
from collections.abc import Iterable

import psutil


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds that these processes have used so far, all threads together."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def idle_cores(pid: int, seconds: float) -> float:
    """Mean number of cores in use by the tree of `pid` over the next `seconds`."""
    pids = tree(pid)
    before, since = cpu_seconds(pids), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(pids) - before) / (time.monotonic() - since)
