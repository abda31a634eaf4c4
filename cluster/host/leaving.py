"""Why a host leaves, real or simulated."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("twinpool.worker")


class WorkerStopped(Exception):
    """The host must leave; the text is the cause, for the proxy and the log."""

    def __init__(self, cause: str, exit_code: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Left:
    """How a host's work ended."""

    cause: str
    exit_code: int


async def until_it_leaves(
    worker_id: str, stop: asyncio.Event, work: Callable[[asyncio.TaskGroup], Coroutine[Any, Any, None]]
) -> Left:
    """Runs `work` and the tasks that it starts, until the first of them raises or `stop` is set; the others end then.

    `WorkerStopped` says what came of it; any other exception is a failure, which is logged.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_leave_when_told(stop))
            tasks.create_task(work(tasks))
    except ExceptionGroup as group:
        left = _left_because_of(worker_id, group)
    log.info("worker_leaving worker=%s cause=%s", worker_id, left.cause)
    return left


async def _leave_when_told(stop: asyncio.Event) -> None:
    await stop.wait()
    raise WorkerStopped("told to stop", 0)


def _left_because_of(worker_id: str, group: ExceptionGroup[Exception]) -> Left:
    """By the first of the errors: the others are what it left behind."""
    first = group.exceptions[0]
    if isinstance(first, WorkerStopped):
        return Left(first.cause, first.exit_code)
    log.error("worker_failed worker=%s", worker_id, exc_info=first)
    return Left(f"{type(first).__name__}: {first}", 1)
