"""Starts and stops a server under measurement, with everything that it starts in turn.

A server runs in a session of its own with a mark in its environment, so that the processes it leaves behind
can be found whatever became of their parents. Only marked processes are ever signalled. A watchdog ends it when
this process is killed.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.launch import watchdog
from cluster.launch.held_start import GO, HOLD

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "TWINPOOL_LAB_MARK"
START_DEADLINE_S = 240.0
_LOG_TAIL = 4000


class ServerFailed(Exception):
    """A server did not start; the message ends with its log."""


@dataclass(frozen=True)
class Launch:
    """How to start one server."""

    name: str
    command: Sequence[str]
    port: int
    env: Mapping[str, str]
    api_key: str = "none"
    ready_line: str = ""
    """Something it prints when it is ready, if answering `/health` is not enough."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def marked_processes(mark: str) -> dict[int, str]:
    """Live processes started under this mark: pid to command line. Zombies do not count."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is not ours
    return found


def wait_for_no_process(mark: str, deadline_s: float) -> dict[int, str]:
    """Waits until every process of a mark is gone; returns those that are still there at the deadline."""
    until = time.monotonic() + deadline_s
    while (left := marked_processes(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


class Server:
    """One server process and everything it starts."""

    def __init__(self, launch: Launch, log_dir: Path) -> None:
        self.name = launch.name
        self.url = f"http://127.0.0.1:{launch.port}"
        self.port = launch.port
        self.api_key = launch.api_key
        self._ready_line = launch.ready_line
        self.mark = uuid.uuid4().hex
        self.log_path = log_dir / f"{launch.name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*HOLD, *launch.command],
                cwd=REPOSITORY,
                env={**os.environ, **launch.env, "PYTHONPATH": str(REPOSITORY), MARK: self.mark},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watchdog = _watch(self.process.pid)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as told:
            told.write(GO)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_healthy(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns when `/health` answers 200 and the ready line was printed.

        Raises `ServerFailed` when the server ends before, or at the deadline.
        """
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.name} exited with {self.process.returncode}:\n{self.log()[-_LOG_TAIL:]}")
            if self._is_healthy() and self._ready_line in self.log():
                return
            time.sleep(0.2)
        raise ServerFailed(f"{self.name} was not healthy after {deadline_s} s:\n{self.log()[-_LOG_TAIL:]}")

    def _is_healthy(self) -> bool:
        # Not urllib: that would ask a proxy of the environment.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> dict[int, str]:
        return marked_processes(self.mark)

    def stop(self, deadline_s: float = 30.0) -> None:
        """Asks with SIGTERM; kills what is left, by id."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(deadline_s)
        wait_for_no_process(self.mark, 5.0)
        self.kill()

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self._watchdog.poll() is None:
            self._watchdog.communicate(watchdog.told("-", self.process.pid), timeout=10)


def _watch(group: int) -> "subprocess.Popen[bytes]":
    """The process that ends this group when our end of its standard input closes, however that happens."""
    process = subprocess.Popen(
        watchdog.COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(watchdog.told("+", group))
    process.stdin.flush()
    return process
