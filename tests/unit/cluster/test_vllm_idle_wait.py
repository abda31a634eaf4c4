"""The wait is tried on vLLM's own message queue: when its internals move, this is what fails."""

import threading
import time
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from cluster import vllm_idle_wait


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_idle_wait.VARIABLE, "asleep")
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # given back after the test

    def no_yield() -> None:  # writers may: they wait only for readers that are far behind
        assert threading.current_thread() is not threading.main_thread(), "the reader yields"

    monkeypatch.setattr(shm_broadcast, "sched_yield", no_yield)
    vllm_idle_wait.register()
    vllm_idle_wait.register()  # as vLLM does


@pytest.fixture
def ends() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """A writer and a reader that have met."""
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    meeting = threading.Thread(target=writer.wait_until_ready)
    meeting.start()
    reader.wait_until_ready()
    meeting.join()
    yield writer, reader
    for end in (writer, reader):
        end.shutdown()


def test_a_reader_sleeps_until_something_is_written(asleep: None, ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    reader._spin_condition.record_read()
    threading.Timer(0.3, writer.enqueue, ["there"]).start()
    began_s, used_s = time.monotonic(), time.thread_time()

    assert reader.dequeue(timeout=5.0) == "there"

    assert time.monotonic() - began_s >= 0.25
    assert time.thread_time() - used_s < 0.15, "the reader kept its core busy"


def test_messages_that_follow_closely_all_arrive(asleep: None, ends: tuple[MessageQueue, MessageQueue]) -> None:
    """Their notices do not."""
    writer, reader = ends

    def write() -> None:
        for number in range(200):
            writer.enqueue(number)

    writing = threading.Thread(target=write)
    writing.start()
    assert [reader.dequeue(timeout=5.0) for _ in range(200)] == list(range(200))
    writing.join()


def test_a_long_wait_is_left_to_vllm(asleep: None, ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    reader._spin_condition.last_read = time.monotonic() - 60
    threading.Timer(0.1, writer.enqueue, ["late"]).start()
    assert reader.dequeue(timeout=5.0) == "late"


def test_a_wait_has_an_end(asleep: None, ends: tuple[MessageQueue, MessageQueue]) -> None:
    with pytest.raises(TimeoutError):
        ends[1].dequeue(timeout=0.05)


@pytest.mark.parametrize("value", [None, "spin"])
def test_nothing_changes_unless_asked(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(vllm_idle_wait.VARIABLE, value)
    before = SpinCondition.wait
    vllm_idle_wait.register()
    assert SpinCondition.wait is before


def test_vllm_finds_it_in_every_process() -> None:
    found = {point.value for point in entry_points(group="vllm.general_plugins")}
    assert "cluster.vllm_idle_wait:register" in found
