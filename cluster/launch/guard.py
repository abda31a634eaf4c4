"""The launcher's side of the watchdog: starts it, tells it what to end, and starts it again when it dies."""

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path

from cluster.launch import watchdog
from cluster.launch.backoff import Backoff
from cluster.launch.logs import log_failure

log = logging.getLogger("twinpool.launcher")

PAUSES_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0)
STEADY_S = 10.0
"""A watchdog that lived for so long is replaced at once; one that keeps dying, more and more seldom."""


class Guard:
    """Sees to it that what is on its list ends with this process, however that ends."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._runtime_dir: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: int | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the watchdog, if there is one now."""
        return self._process.pid if self._process is not None and self._pipe is not None else None

    async def start(self) -> None:
        """Starts the watchdog, once; raises `OSError` when that is impossible."""
        if self._keeper is None:
            await self._spawn()
            self._keeper = asyncio.create_task(self._keep(), name="watch the watchdog")
            self._keeper.add_done_callback(log_failure)

    def covers(self, group: int) -> None:
        """A process group is to end with this process."""
        self._groups.add(group)
        self._tell(watchdog.told("+", group))

    def spares(self, group: int) -> None:
        """It is gone; the number may soon be somebody else's."""
        self._groups.discard(group)
        self._tell(watchdog.told("-", group))

    def removes(self, runtime_dir: Path) -> None:
        """A directory is to go if this process is killed."""
        self._runtime_dir = runtime_dir
        self._tell(watchdog.told_directory(runtime_dir))

    async def dismiss(self) -> None:
        """Ends the watchdog, which ends what is on the list; the directory stays."""
        if self._keeper is not None:
            self._keeper.cancel()
        self._runtime_dir = None
        self._tell(watchdog.told_directory(None))
        self._close()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), watchdog.GRACE_S * 2)

    async def _keep(self) -> None:
        backoff = Backoff(PAUSES_S, STEADY_S)
        while True:
            assert self._process is not None
            began_s = time.monotonic()
            returncode = await self._process.wait()
            self._close()
            paused_s = backoff.failed(time.monotonic() - began_s)
            log.warning("watchdog_lost returncode=%d next_in_s=%g", returncode, paused_s)
            await asyncio.sleep(paused_s)
            while True:
                try:
                    await self._spawn()
                    break
                except OSError as error:
                    paused_s = backoff.failed(0.0)
                    log.error("watchdog_not_started error=%s next_in_s=%g", error, paused_s)
                    await asyncio.sleep(paused_s)

    async def _spawn(self) -> None:
        theirs, ours = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *watchdog.COMMAND,
                stdin=theirs,
                # Not ours: whoever reads our output must not wait for the watchdog to end.
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        # A watchdog that is stopped must not hold up the launcher.
        os.set_blocking(ours, False)
        self._pipe = ours
        for group in self._groups:
            self._tell(watchdog.told("+", group))
        self._tell(watchdog.told_directory(self._runtime_dir))

    def _tell(self, line: bytes) -> None:
        """At once, so that what is done next is done under its eyes. If it is dead, its successor is told all."""
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, line)
        except BrokenPipeError:
            pass
        except BlockingIOError:
            log.error("watchdog_deaf pid=%s: it does not read what it is told", self.pid)

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
