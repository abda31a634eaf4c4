"""Starts dummy workers and knows whether any process of theirs is left."""

import asyncio
import sys
import time
from pathlib import Path

from cluster.launch.local import WorkerCommand

DUMMY = Path(__file__).with_name("dummy_worker.py")
DEADLINE_S = 15.0


def dummy(directory: Path, worker_id: str = "decode-0", behaviour: str = "obedient") -> WorkerCommand:
    """A worker whose pids come to be in `directory/worker_id.pids`."""
    return WorkerCommand(
        worker_id=worker_id,
        role=worker_id.partition("-")[0],
        argv=(sys.executable, str(DUMMY), str(directory / f"{worker_id}.pids"), behaviour),
        env={},
        log_path=directory / f"{worker_id}.log",
    )


async def family(directory: Path, worker_id: str = "decode-0") -> list[int]:
    """The pids of a dummy, its child and its grandchild, once all three run."""
    path = directory / f"{worker_id}.pids"
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, "the dummy did not start"
        await asyncio.sleep(0.02)
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) == 3
    return pids


def alive(pids: list[int]) -> list[int]:
    """Those that run; zombies do not."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2]


async def gone_within(pids: list[int], timeout_s: float) -> bool:
    """Whether all of them end in time."""
    deadline_s = time.monotonic() + timeout_s
    while alive(pids):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True
