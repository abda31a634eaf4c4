"""A process that is told to end while it is still importing ends."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (ignored,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(ignored, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("module", ["prefill.worker", "decode.worker", "proxy.api_servers", "cluster.simulated"])
async def test_an_interrupt_ends_a_process_that_has_just_been_started(tmp_path: Path, module: str) -> None:
    """Whoever started it may have ignored SIGINT, as shells do for what runs in the background."""
    os.mkfifo(tmp_path / "settings.json")  # if it ever gets so far, it waits
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        argv = (sys.executable, "-m", module, str(tmp_path / "settings.json"))
        process = await asyncio.create_subprocess_exec(*argv, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    finally:
        signal.signal(signal.SIGINT, before)
    deadline_s = time.monotonic() + 30
    while ignores(process.pid, signal.SIGINT):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 15) == -signal.SIGINT
