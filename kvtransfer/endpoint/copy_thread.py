"""The thread that reads other processes' memory, so that the socket thread never waits for a copy."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.copy_plan import plan_copy
from kvtransfer.endpoint.peers import PeerKey
from kvtransfer.imports import Piece
from kvtransfer.layout import Region
from kvtransfer.links.host_memory import MemoryReadError, read_memory

log = logging.getLogger("twinpool.kvtransfer")


@dataclass(frozen=True)
class CopyJob:
    piece: Piece
    pid: int
    sources: tuple[Region, ...]
    """The exporter's regions of the layers of `piece`, at the addresses by which this process reads them."""
    key: PeerKey
    link: str
    targets: tuple[Region, ...]
    """Ours, in the same order."""


@dataclass(frozen=True)
class CopyResult:
    job: CopyJob
    copy_s: float
    ended_s: float
    """On the machine's monotonic clock: what was read later than the lease is void."""
    failure_kind: str = ""
    reason: str = ""


class Copier(Protocol):
    """Whoever carries out copy jobs. `results` is emptied by the owner."""

    @property
    def results(self) -> deque[CopyResult]: ...

    @property
    def error(self) -> BaseException | None:
        """Why no further job will have a result."""

    def submit(self, job: CopyJob) -> None: ...

    def close(self, timeout_s: float) -> bool: ...


class CopyThread:
    """`results` is filled by the thread and emptied by its owner, whom `on_result` wakes."""

    def __init__(self, name: str, on_result: Callable[[], None]) -> None:
        self.results: deque[CopyResult] = deque()
        self.error: BaseException | None = None
        self._on_result = on_result
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """After the jobs already submitted; False when they take longer than that."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self.results.append(self._copy(job))
                self._on_result()
        except BaseException as error:
            log.exception("copy_thread_died")
            self.error = error
            self._on_result()

    def _copy(self, job: CopyJob) -> CopyResult:
        piece = job.piece
        started_s = time.monotonic()
        try:
            read_memory(job.pid, plan_copy(piece.source_ids, piece.target_ids, job.sources, job.targets))
        except MemoryReadError as error:
            ended_s = time.monotonic()
            return CopyResult(job, ended_s - started_s, ended_s, error.failure_kind, str(error))
        ended_s = time.monotonic()
        return CopyResult(job, ended_s - started_s, ended_s)
