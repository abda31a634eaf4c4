"""What an earlier start of a worker left on this node: its actor was killed, and a watchdog is still ending it.

A new process of the worker waits for the old one's memory and devices. Processes are known by a mark in their
environment, which everything inherits that a worker starts.
"""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from cluster.launch import watchdog

MARK = "TWINPOOL_WORKER_MARK"
_POLL_S = 0.05
# The watchdog's own time, and what it takes to notice.
WATCHDOG_S = watchdog.GRACE_S + 2 * watchdog.DEATH_S + 1.0


def marked(mark: str) -> list[int]:
    """Living processes of this user with the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it ended meanwhile, or is somebody else's
            variables = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if wanted in variables and state not in "ZX":
                found.append(int(entry.name))
    return found


async def end_leftovers(mark: str, patience_s: float = WATCHDOG_S) -> None:
    """Returns when no process has the mark; those left after `patience_s` are killed."""
    if await _none_left(mark, patience_s):
        return
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await _none_left(mark, watchdog.DEATH_S)


async def _none_left(mark: str, timeout_s: float) -> bool:
    """Looked up again and again, because nobody is told when a process ends that is not his child."""
    deadline = time.monotonic() + timeout_s
    while left := marked(mark):
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(_POLL_S)
    return not left
