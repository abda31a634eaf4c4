"""The thread that computes checksums, so that neither the engine's nor the endpoint's thread does.

It starts with its first job, so that it costs nothing where nobody verifies.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.gpu.device import CudaUnusable
from kvtransfer.layout import Region
from kvtransfer.links.zmq_frames import BlockMemory
from kvtransfer.verification.checksums import Interrupted, checksums

log = logging.getLogger("twinpool.kvtransfer")


@dataclass(frozen=True)
class CheckJob:
    """`block_ids`, or units, of our cache, over `layers`."""

    importer: bytes | None
    """Who asked for the checksums; None when an import of our own needs them."""
    check_id: int
    block_ids: tuple[int, ...]
    layers: tuple[tuple[Region, ...], ...]


@dataclass(frozen=True)
class CheckResult:
    job: CheckJob
    values: list[int]
    """One per block."""
    reason: str = ""
    """Why there are none."""


class CheckThread:
    """`results` is filled by the thread and emptied by its owner, whom `on_result` wakes."""

    def __init__(
        self, name: str, open_memory: Callable[[], BlockMemory], max_bytes: int, on_result: Callable[[], None]
    ) -> None:
        """`open_memory` is called by the thread; `max_bytes` are gathered at a time."""
        self.results: deque[CheckResult] = deque()
        self.error: BaseException | None = None
        """Why no further job will have a result."""
        self._open_memory = open_memory
        self._max_bytes = max_bytes
        self._on_result = on_result
        self._jobs: queue.SimpleQueue[CheckJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_closing = threading.Event()

    def submit(self, job: CheckJob) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """In the middle of a job if need be; False when it takes longer than that."""
        self._is_closing.set()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        memory: BlockMemory | None = None
        try:
            while (job := self._jobs.get()) is not None and not self._is_closing.is_set():
                try:
                    memory = memory or self._open_memory()
                    values = checksums(memory, job.block_ids, job.layers, self._max_bytes, self._is_closing.is_set)
                    self.results.append(CheckResult(job, values))
                except CudaUnusable as error:
                    self.results.append(CheckResult(job, [], str(error)))
                except Interrupted:
                    break
                self._on_result()
            if memory:
                memory.close()
        except BaseException as error:
            log.exception("check_thread_died")
            self.error = error
            self._on_result()
