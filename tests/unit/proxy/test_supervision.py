"""Work ends with what it gives, with the order to stop, or with the task that it cannot do without."""

import asyncio
from types import SimpleNamespace

import pytest

from proxy import supervision
from proxy.supervision import beats, first_failure, log_failure, unless_stopped


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


async def test_a_failed_task_that_nobody_waits_for_is_logged_under_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise OSError("no room")

    caplog.set_level("ERROR", "twinpool.proxy")
    task = asyncio.create_task(work(), name="remove prefill-1")
    task.add_done_callback(log_failure)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert "task_failed task=remove prefill-1 error=no room" in caplog.text


async def test_a_beat_tells_how_long_the_loop_stood_still_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.25, 10.5, 15.0])
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(supervision, "asyncio", SimpleNamespace(sleep=lambda _s: asyncio.sleep(0)))
    told = beats(0.25)
    assert [await anext(told) for _ in range(3)] == [(10.25, 0.0), (10.5, 0.0), (15.0, 4.25)]
    await told.aclose()
