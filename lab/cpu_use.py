"""CPU time of process trees, as the kernel counts it."""

import time
from collections.abc import Iterable

import psutil

_SCHEDULER_CLOCK = 2


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds that these processes have computed so far, all threads together, to the nanosecond.

    `/proc/PID/stat` counts in ticks of 10 ms, too coarse for a tenth of a millisecond per token.
    """
    total = 0.0
    for pid in pids:
        try:
            # What glibc's clock_getcpuclockid() makes of a process id.
            total += time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK)
        except OSError:
            continue  # it ended
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
