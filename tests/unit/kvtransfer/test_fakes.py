"""The rules of the fakes themselves, so that what passes with them means something."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.kvtransfer.fake_cuda import CUDARuntimeError, FakeMachine, FakeProcess
from tests.unit.kvtransfer.fake_nccl import FakeCommunicator, FakeNetwork, NcclError
from tests.unit.kvtransfer.rank_pair import eventually


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine(num_devices=2)
    yield machine
    machine.close()


@pytest.fixture
def process(machine: FakeMachine) -> FakeProcess:
    process = machine.process(1)
    process.cuda.Device(0).use()
    return process


def upload(process: FakeProcess, target: int, data: bytes, stream: Any) -> Any:
    pinned = process.cuda.alloc_pinned_memory(len(data))
    pinned[:] = data
    process.cuda.runtime.memcpyAsync(target, pinned.ptr, len(data), 1, stream.ptr)
    return pinned


def test_a_copy_has_not_happened_before_its_event_is_done(machine: FakeMachine, process: FakeProcess) -> None:
    stream, target = process.cuda.Stream(non_blocking=True), process.array((64,))
    with machine.paused():
        upload(process, target.address, b"x" * 64, stream)
        event = process.cuda.Event()
        event.record(stream)
        assert not event.done
        assert bytes(target.bytes_now()) != b"x" * 64
        machine.step()
        assert bytes(target.bytes_now()) != b"x" * 64, "half done"
    eventually(lambda: event.done)
    assert bytes(target.bytes_now()) == b"x" * 64


def test_pinned_memory_is_read_when_the_copy_runs(machine: FakeMachine, process: FakeProcess) -> None:
    stream, target = process.cuda.Stream(non_blocking=True), process.array((4,))
    with machine.paused():
        pinned = upload(process, target.address, b"then", stream)
        pinned[:] = b"late"
        while machine.step():
            pass
    assert bytes(target.bytes_now()) == b"late"


def test_streams_are_ordered_only_by_events(machine: FakeMachine, process: FakeProcess) -> None:
    first, second = (process.cuda.Stream(non_blocking=True) for _ in range(2))
    target = process.array((4,))
    with machine.paused():
        upload(process, target.address, b"aaaa", first)
        event = process.cuda.Event()
        event.record(first)
        second.wait_event(event)
        upload(process, target.address, b"bbbb", second)
        while machine.step():
            pass
    assert bytes(target.bytes_now()) == b"bbbb"


def test_a_fault_surfaces_at_a_later_call(machine: FakeMachine, process: FakeProcess) -> None:
    stream = process.cuda.Stream(non_blocking=True)
    upload(process, 0xBAD, b"aaaa", stream)
    event = process.cuda.Event()
    eventually(lambda: process.error)
    with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
        assert event.done


def test_ipc_handles_open_in_other_processes_only_and_not_after_the_owner_died(
    machine: FakeMachine, process: FakeProcess
) -> None:
    other, array = machine.process(2), process.array((64,))
    handle = process.cuda.runtime.ipcGetMemHandle(array.address)
    with pytest.raises(CUDARuntimeError, match="InvalidContext"):
        process.cuda.runtime.ipcOpenMemHandle(handle)
    here = other.cuda.runtime.ipcOpenMemHandle(handle)
    assert here != array.address
    assert np.array_equal(other.view(here, 64), array.bytes_now())
    other.cuda.runtime.ipcCloseMemHandle(here)
    with pytest.raises(CUDARuntimeError):
        other.cuda.runtime.ipcCloseMemHandle(here)
    with pytest.raises(CUDARuntimeError, match="InvalidValue"):
        process.cuda.runtime.ipcGetMemHandle(process.malloc(64, "virtual"))
    process.kill()
    with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
        other.cuda.runtime.ipcOpenMemHandle(handle)


class Ranks:
    """Two processes with a communicator, and streams and memory to use it with."""

    def __init__(self, machine: FakeMachine) -> None:
        self.network = FakeNetwork(machine)
        self.processes = [machine.process(pid) for pid in (1, 2)]
        self.communicators: list[FakeCommunicator] = [None, None]  # type: ignore[list-item]
        self.streams: list[Any] = [None, None]
        for process in self.processes:
            self.network.connect(process)
        unique_id = self.processes[0].cuda.nccl.get_unique_id()

        def join(rank: int) -> None:
            self.processes[rank].cuda.Device(rank).use()
            self.streams[rank] = self.processes[rank].cuda.Stream(non_blocking=True)
            self.communicators[rank] = self.processes[rank].cuda.nccl.NcclCommunicator(2, unique_id, rank)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=5)

    def post(self, rank: int, kind: str, address: int, size: int) -> Any:
        getattr(self.communicators[rank], kind)(address, size, 1, 1 - rank, self.streams[rank].ptr)
        event = self.processes[rank].cuda.Event()
        event.record(self.streams[rank])
        return event


@pytest.fixture
def ranks(machine: FakeMachine) -> Iterator[Ranks]:
    ranks = Ranks(machine)
    yield ranks
    ranks.network.close()


def test_a_send_ends_when_its_receive_is_posted(ranks: Ranks) -> None:
    source, target = (process.array((64,)) for process in ranks.processes)
    sent = ranks.post(0, "send", source.address, 64)
    time.sleep(0.02)
    assert not sent.done
    received = ranks.post(1, "recv", target.address, 64)
    eventually(lambda: sent.done and received.done)
    assert np.array_equal(source.bytes_now(), target.bytes_now())


@pytest.mark.parametrize("size", [32, 128])
def test_sizes_that_differ_hang_until_an_abort(ranks: Ranks, size: int) -> None:
    source, target = (process.array((128,)) for process in ranks.processes)
    sent, received = ranks.post(0, "send", source.address, 64), ranks.post(1, "recv", target.address, size)
    time.sleep(0.05)
    assert not sent.done
    assert not received.done
    ranks.communicators[1].abort()
    eventually(lambda: received.done)
    assert not np.array_equal(source.bytes_now()[:32], target.bytes_now()[:32])
    assert not sent.done
    with pytest.raises(NcclError):
        eventually(lambda: ranks.communicators[0].check_async_error())
    ranks.communicators[0].abort()
    eventually(lambda: sent.done)


def test_two_ways_at_once_need_a_group(ranks: Ranks) -> None:
    arrays = [[process.array((16,)) for _ in range(2)] for process in ranks.processes]
    for rank in (0, 1):
        ranks.processes[rank].cuda.nccl.groupStart()
        ranks.post(rank, "recv", arrays[rank][1].address, 16)
        ranks.post(rank, "send", arrays[rank][0].address, 16)
        assert not ranks.communicators[rank].world.posted[rank], "nothing happens before the group ends"
        ranks.processes[rank].cuda.nccl.groupEnd()
    eventually(lambda: np.array_equal(arrays[0][0].bytes_now(), arrays[1][1].bytes_now()))
    eventually(lambda: np.array_equal(arrays[1][0].bytes_now(), arrays[0][1].bytes_now()))


def test_a_ranks_death_is_told_later_and_only_when_asked(ranks: Ranks) -> None:
    received = ranks.post(1, "recv", ranks.processes[1].array((16,)).address, 16)
    ranks.processes[0].kill()
    ranks.communicators[1].check_async_error()
    with pytest.raises(NcclError):
        eventually(lambda: ranks.communicators[1].check_async_error())
    assert not received.done
