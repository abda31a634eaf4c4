"""A cluster for all tests of a session: one that breaks it costs the next a start, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from lab.launches import twinpool
from lab.server_process import Server, ServerFailed, free_port
from tests.engine.observed import status, wait_until

IDLE_WITHIN_S = 20.0


class SharedCluster:
    """Started once, and again only when a test left it dead, incomplete or busy.

    `configure` makes the configuration for a port.
    """

    def __init__(self, name: str, configure: Callable[[int], dict[str, Any]], log_dir: Path) -> None:
        self._name = name
        self._configure = configure
        self._log_dir = log_dir
        self._server: Server | None = None
        self._num_starts = 0
        self._is_new = True

    def ready(self) -> Server:
        """Complete and idle. Raises `ServerFailed` if it does not start."""
        if self._server is not None and not self._is_new and not _becomes_idle(self._server):
            self.stop()
        if self._server is None:
            self._server = self._start()
        if self._is_new:
            try:
                self._server.wait_until_healthy()
            except ServerFailed:
                self._server.stop()  # so that the tests that follow fail at once
                raise
            self._is_new = False
        return self._server

    def _start(self) -> Server:
        self._num_starts += 1
        self._is_new = True
        name = self._name if self._num_starts == 1 else f"{self._name}-{self._num_starts}"
        return Server(twinpool(name, self._configure(free_port()), self._log_dir), self._log_dir)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def _becomes_idle(server: Server) -> bool:
    try:
        wait_until(
            "the cluster is idle or gone",
            lambda: server.process.poll() is not None or _is_idle(server.url),
            IDLE_WITHIN_S,
            every_s=0.02,
        )
    except (TimeoutError, httpx.HTTPError):
        return False
    return server.process.poll() is None


def _is_idle(url: str) -> bool:
    """No worker is missing, and no request is in the proxy."""
    seen = status(url)
    return not (seen.requests_running or seen.requests_waiting) and all(it.state == "ready" for it in seen.workers)
