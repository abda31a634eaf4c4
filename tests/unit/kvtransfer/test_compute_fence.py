"""Announcements and places wait for the engine's computation, and the engine does not wait for them."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtransfer.compute_fence import CudaFence, FencedCalls, NoFence
from kvtransfer.gpu.device import CudaDevice
from kvtransfer.gpu.device_thread import DeviceThread
from tests.unit.kvtransfer.fake_cuda import FakeArray, FakeMachine, FakeProcess, FakeStream
from tests.unit.kvtransfer.rank_pair import eventually


class Engine:
    """Computes in a stream of its own: fills an array, some time later."""

    def __init__(self, machine: FakeMachine) -> None:
        self.process: FakeProcess = machine.process(1)
        self.device = CudaDevice(0, self.process.cupy, self.process.driver)
        self.stream: FakeStream = self.process.cuda.Stream(non_blocking=True)
        self.array: FakeArray = self.process.array((64,))
        self.errors: list[BaseException | None] = []
        self.thread = DeviceThread("kv-gpu-test", self.device, lambda: self.errors.append(self.thread.error))
        self.fence = CudaFence(self.device, self.thread, lambda: self.stream.ptr)

    def compute(self, value: int) -> None:
        pinned = self.process.cuda.alloc_pinned_memory(64)
        pinned[:] = bytes([value]) * 64
        self.process.cuda.runtime.memcpyAsync(self.array.address, pinned.ptr, 64, 1, self.stream.ptr)

    def has_computed(self, value: int) -> bool:
        return bool(np.all(self.array.bytes_now() == value))


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine()
    yield machine
    machine.close()


@pytest.fixture
def engine(machine: FakeMachine) -> Iterator[Engine]:
    engine = Engine(machine)
    yield engine
    assert engine.thread.close(timeout_s=5)


def test_a_call_comes_when_what_was_started_before_it_is_in_memory(machine: FakeMachine, engine: Engine) -> None:
    seen: list[bool] = []
    with machine.paused():
        engine.compute(5)
        started_s = time.monotonic()
        engine.fence.when_computed(lambda: seen.append(engine.has_computed(5)))
        assert time.monotonic() - started_s < 0.5, "the engine's thread does not wait"
        time.sleep(0.02)
        assert seen == []
    eventually(lambda: seen)
    assert seen == [True]


def test_a_call_does_not_wait_for_what_is_started_after_it(machine: FakeMachine, engine: Engine) -> None:
    seen: list[str] = []
    with machine.paused():
        engine.fence.when_computed(lambda: seen.append("first"))
        while machine.step():
            pass
        engine.compute(5)
        eventually(lambda: seen)
        engine.fence.when_computed(lambda: seen.append("second"))
        time.sleep(0.02)
        assert seen == ["first"]
    eventually(lambda: len(seen) == 2)


def test_calls_come_in_their_order(engine: Engine) -> None:
    seen: list[int] = []
    for number in range(20):
        engine.compute(number)
        engine.fence.when_computed(lambda number=number: seen.append(number))  # type: ignore[misc]
    eventually(lambda: len(seen) == 20)
    assert seen == sorted(seen)


def test_a_dropped_call_is_never_made(machine: FakeMachine, engine: Engine) -> None:
    fenced = FencedCalls(engine.fence)
    seen: list[str] = []
    with machine.paused():
        engine.compute(1)
        fenced.call("t", lambda: seen.append("announced"))
        fenced.call("u", lambda: seen.append("other"))
        fenced.drop("t")
        fenced.call("t", lambda: seen.append("announced again"))
    eventually(lambda: len(seen) == 2)
    assert seen == ["other", "announced again"]


def test_without_a_gpu_calls_are_made_at_once() -> None:
    seen: list[int] = []
    fenced = FencedCalls(NoFence())
    fenced.call("t", lambda: seen.append(1))
    assert seen == [1]
    fenced.drop("t")


def test_a_failed_device_ends_the_thread_and_is_reported(engine: Engine) -> None:
    engine.process.cuda.runtime.memcpyAsync(
        0xBAD, engine.process.cuda.alloc_pinned_memory(8).ptr, 8, 1, engine.stream.ptr
    )
    engine.fence.when_computed(lambda: None)
    eventually(lambda: engine.errors)
    assert "IllegalAddress" in str(engine.errors[0])
