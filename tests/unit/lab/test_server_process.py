"""Whatever becomes of a measurement or a test, the servers it started end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.server_process import Launch, Server, marked_processes, wait_for_no_process

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"

STARTER = """
import sys, time
from pathlib import Path
from lab.server_process import Launch, Server

server = Server(Launch("sleeper", [sys.executable, "-c", sys.argv[1]], 1, {}), Path(sys.argv[2]))
print(server.mark, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_server_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, SLEEPER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert starter.stdout is not None
        mark = starter.stdout.readline().decode().strip()
        assert marked_processes(mark)
    finally:
        starter.send_signal(number)
        starter.communicate(timeout=10)
    assert wait_for_no_process(mark, 10.0) == {}


def test_a_stopped_server_takes_its_watchdog_along(tmp_path: Path) -> None:
    server = Server(Launch("sleeper", [sys.executable, "-c", SLEEPER], 1, {}), tmp_path)
    watching = server._watchdog.pid
    until_s = time.monotonic() + 10
    while "up" not in server.log() and time.monotonic() < until_s:
        time.sleep(0.01)
    server.stop()
    server.kill()  # again, as a fixture may
    assert server.process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(watching, 0)
