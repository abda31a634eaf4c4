"""Why a host leaves: the first thing that happened says it."""

import asyncio

import pytest

from cluster.host.leaving import Left, WorkerStopped, until_it_leaves


async def test_who_is_told_to_stop_ends_its_work_and_leaves_in_order() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def work(_tasks: asyncio.TaskGroup) -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert await until_it_leaves("prefill-0", stop, work) == Left("told to stop", 0)
    assert ended.is_set()


@pytest.mark.parametrize(
    ("cause", "left"),
    [
        (WorkerStopped("the proxy shut down", 0), Left("the proxy shut down", 0)),
        (ValueError("no such thing"), Left("ValueError: no such thing", 1)),
    ],
)
async def test_what_happened_first_is_the_cause_whatever_breaks_while_it_leaves(cause: Exception, left: Left) -> None:
    async def breaks_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the socket is closed")

    async def work(tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(breaks_when_cancelled())
        await asyncio.sleep(0)
        raise cause

    assert await until_it_leaves("prefill-0", asyncio.Event(), work) == left
