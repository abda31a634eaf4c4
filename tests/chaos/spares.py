"""Keeps one worker of each pool at work and the others frozen, so that one start serves many deaths.

A frozen worker (SIGSTOP on all its processes) falls silent and is given up by the proxy; thawed, it reports
again and is taken back. That is behaviour worth a test by itself, and a hundred times cheaper than a new start.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from lab.server_process import Server
from tests.engine.observed import status, wait_until, worker


class SparedCluster:
    """A cluster whose spare workers stand still."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        # A cluster serves as soon as one pair is up.
        wait_until("all workers are ready", lambda: all(it.state == "ready" for it in status(self.url).workers), 120)
        # Kept from the start: the tree of a worker falls apart when its host dies.
        self._processes = {
            item.worker_id: [item.pid, *(child.pid for child in psutil.Process(item.pid).children(recursive=True))]
            for item in status(server.url).workers
        }
        self._spare: dict[str, list[str]] = {}

    def freeze_spares(self) -> None:
        """Leaves `prefill-0` and `decode-0` at work. Doing it twice is doing it once."""
        if self._spare:
            return
        self._spare = {"prefill": [], "decode": []}
        for worker_id in sorted(self._processes):
            if not worker_id.endswith("-0"):
                self._signal(worker_id, signal.SIGSTOP)
                self._spare[worker_id.rpartition("-")[0]].append(worker_id)
        for role in self._spare:
            self._wait_for(role, [f"{role}-0"])

    def _wait_for(self, role: str, workers: list[str]) -> None:
        wait_until(f"the {role} workers are {workers}", lambda: self.alive(role) == workers, 15)

    def alive(self, role: str) -> list[str]:
        return [item.worker_id for item in status(self.url).workers if item.role == role and item.state == "ready"]

    def pair(self) -> tuple[str, str]:
        """The prefill and the decode worker that work now; a missing one is replaced by a spare."""
        self.freeze_spares()
        for role, spare in self._spare.items():
            if not self.alive(role):
                if not spare:
                    raise LookupError(f"no spare {role} worker is left")
                thawed = spare.pop(0)
                self._signal(thawed, signal.SIGCONT)
                self._wait_for(role, [thawed])
        return self.alive("prefill")[0], self.alive("decode")[0]

    def thaw(self, role: str) -> str:
        """One more worker, if there is a spare one; else an empty string."""
        self.freeze_spares()
        if not self._spare[role]:
            return ""
        thawed = self._spare[role].pop(0)
        self._signal(thawed, signal.SIGCONT)
        wait_until(f"{thawed} works", lambda: thawed in self.alive(role), 15)
        return thawed

    def end(self, worker_id: str, kind: str) -> None:
        """SIGKILL to a process of a worker: its `host`, its engine `core`, its only `rank`; or `drain`: SIGTERM."""
        if kind == "drain":
            os.kill(self._process(worker_id, "host"), signal.SIGTERM)
        else:
            os.kill(self._process(worker_id, kind), signal.SIGKILL)

    def kill_all(self, role: str) -> None:
        """Kills whoever works in a pool and takes no spare."""
        self.freeze_spares()
        for worker_id in self.alive(role):
            self.end(worker_id, "host")
        wait_until(f"no {role} worker is left", lambda: not self.alive(role), 10)

    @contextlib.contextmanager
    def frozen_rank(self, worker_id: str) -> Iterator[None]:
        pid = self._process(worker_id, "rank")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def whole(self, worker_id: str) -> bool:
        """Nothing runs there and every block is free."""
        item = worker(self.url, worker_id)
        blocks = item.blocks
        assert blocks.free + blocks.used + blocks.leased == blocks.total, item
        return 0 < blocks.total == blocks.free and not (
            item.running or item.waiting or item.exports_open or item.imports_open
        )

    def processes_of(self, worker_id: str) -> list[int]:
        """Those that live."""
        return [pid for pid in self._processes[worker_id] if psutil.pid_exists(pid) and _lives(pid)]

    def _process(self, worker_id: str, kind: str) -> int:
        if kind == "host":
            return self._processes[worker_id][0]
        title = {"core": "VLLM::EngineCor", "rank": "VLLM::Worker"}[kind]
        found = [pid for pid in self._processes[worker_id] if title in " ".join(psutil.Process(pid).cmdline())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} processes of {worker_id} are called {title}, expected one")
        return found[0]

    def _signal(self, worker_id: str, signal_: signal.Signals) -> None:
        for pid in self._processes[worker_id]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
