import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.unit.cluster.families import alive, family

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from cluster.launch.local import LocalLauncher
from cluster.terminal import interruption as module
from cluster.terminal.interruption import Interruption
from tests.unit.cluster.families import dummy, family

async def main() -> None:
    directory, busy = Path(sys.argv[1]), sys.argv[2] == "busy"
    module._REACTION_S, module._FORCED_GRACE_S = float(sys.argv[3]), 0.2
    launcher = LocalLauncher(lambda told: None)
    stop = asyncio.Event()
    interruption = Interruption(stop, launcher.stop_now, 1.0)
    await launcher.start([dummy(directory, behaviour="stubborn")])
    await family(directory)
    print("up", flush=True)
    if busy:
        while True:  # as an import does, this gives the event loop no turn
            time.sleep(0.01)
    await stop.wait()
    interruption.noticed()
    await launcher.stop(0.5)
    sys.exit(128 + interruption.signal_number)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("state", "number"), [("idle", signal.SIGINT), ("busy", signal.SIGTERM), ("idle", signal.SIGHUP)]
)
async def test_a_signal_ends_everything_promptly_even_while_the_loop_is_busy(
    tmp_path: Path, state: str, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(tmp_path), state, "0.3", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 15) == b"up\n"
    pids = await family(tmp_path)
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), 8) == 128 + number
    assert alive(pids) == []


async def test_who_is_started_with_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *("nohup", sys.executable, "-c", SCRIPT, str(tmp_path), "idle", "5"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 15) == b"up\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 15) == 128 + signal.SIGTERM


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(tmp_path), "busy", "30", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 15)
    pids = await family(tmp_path)
    process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 5) == 130
    assert alive(pids) == []
