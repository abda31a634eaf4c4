"""What ends the proxy before it is told to, and what becomes of tasks that fail."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from cluster.launch.logs import failure_logger

log = logging.getLogger("twinpool.proxy")


class ProxyStartError(Exception):
    """The proxy could not start; a sentence for the operator."""


async def unless_stopped(
    work: Awaitable[Any], stop: asyncio.Event, supervised: Sequence["asyncio.Task[Any]"] = ()
) -> Any:
    """The result of `work`, or None if `stop` came first. Raises `RuntimeError` if one of `supervised` ended before."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped, *supervised), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if stopped.done():
            return None
        raise RuntimeError(first_failure(supervised))
    finally:
        stopped.cancel()
        task.cancel()


def first_failure(tasks: Sequence["asyncio.Task[Any]"]) -> str:
    """Why a task that must not end did."""
    for task in tasks:
        if task.done():
            error = None if task.cancelled() else task.exception()
            return f"the proxy's task {task.get_name()} ended: {error or 'cancelled'}"
    return "a task of the proxy ended"


log_failure = failure_logger(log, "task_failed")
"""To be called when a task ends that nobody waits for."""


async def beats(every_s: float) -> AsyncIterator[tuple[float, float]]:
    """Without end, every so often: the time, and for how long this event loop stood still before it.

    While it stands still nobody can be heard, which is not their silence. Times are monotonic, in seconds.
    """
    last_s = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now_s = time.monotonic()
        late_s, last_s = now_s - last_s - every_s, now_s
        yield now_s, late_s if late_s > every_s else 0.0
