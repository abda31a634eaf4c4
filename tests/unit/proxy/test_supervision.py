"""Work ends with what it gives, with the order to stop, or with the task that it cannot do without."""

import asyncio

import pytest

from proxy.supervision import first_failure, unless_stopped


async def never() -> None:
    await asyncio.Event().wait()


async def test_work_that_ends_gives_its_result() -> None:
    async def work() -> int:
        return 3

    assert await unless_stopped(work(), asyncio.Event()) == 3


async def test_an_order_to_stop_ends_the_work() -> None:
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await never()
        finally:
            cancelled.set()

    waiting = asyncio.create_task(unless_stopped(work(), stop))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting is None
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_task_that_must_not_end_ends_the_work_and_is_named() -> None:
    async def read() -> None:
        raise OSError("the socket is gone")

    reader = asyncio.create_task(read(), name="socket of workers")
    with pytest.raises(RuntimeError, match="the proxy's task socket of workers ended: the socket is gone"):
        await asyncio.wait_for(unless_stopped(never(), asyncio.Event(), [reader]), 5)


async def test_a_task_that_was_cancelled_is_named_too() -> None:
    task = asyncio.create_task(never(), name="worker-beats")
    task.cancel()
    await asyncio.wait([task])
    assert first_failure([task]) == "the proxy's task worker-beats ended: cancelled"
