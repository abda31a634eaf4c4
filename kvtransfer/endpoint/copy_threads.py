"""The threads that read other processes' memory, so that the socket thread never waits for a copy."""

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
from kvtransfer.layout import Region
from kvtransfer.links.host_memory import MemoryReadError, read_memory
from kvtransfer.transfers.imports import Piece

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


NUM_THREADS = 2
"""One core reads about half of what the memory gives; and while one thread plans or reports, the other copies."""


class CopyThreads:
    """`results` is filled by the threads and emptied by their owner, whom `on_result` wakes. Jobs end in any order."""

    def __init__(self, name: str, on_result: Callable[[], None]) -> None:
        self.results: deque[CopyResult] = deque()
        self.error: BaseException | None = None
        self._on_result = on_result
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyJob) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """After the jobs already submitted; False when they take longer than that."""
        until_s = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

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
