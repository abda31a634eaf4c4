"""What ends the proxy before it is told to: a start that fails, a task that must not end and does."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any


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
