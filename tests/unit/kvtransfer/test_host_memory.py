import ctypes
import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from kvtransfer.copy_plan import plan_copy
from kvtransfer.layout import Region
from kvtransfer.links import host_memory
from kvtransfer.links.host_memory import MemoryReadError, host_id, read_memory, why_unreadable


def region(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.strides[0], array.shape[1], array.shape[0])


def memory(num_blocks: int = 3000, run_bytes: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_blocks, run_bytes), dtype=np.uint8)


def test_more_pieces_than_one_call_takes_are_read() -> None:
    source, target = memory(), np.zeros((3000, 7), dtype=np.uint8)
    order = np.random.default_rng(1).permutation(3000).tolist()
    plan = plan_copy(list(range(3000)), order, [region(source)], [region(target)])
    assert len(plan) > 2 * 1024
    read_memory(os.getpid(), plan)
    assert np.array_equal(target[order], source)


@pytest.mark.parametrize("most_bytes", [1, 5, 7, 20, 1000])
def test_reading_goes_on_where_the_kernel_stopped(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops_early(pid: int, local: int, count: int, remote: int, _: int, flags: int) -> int:
        targets = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(local)).reshape(-1, 2)
        sources = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(remote)).reshape(-1, 2)
        left = most_bytes
        for (target, length), (source, _length) in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, min(left, length))
            left -= min(left, length)
        return most_bytes - left

    monkeypatch.setattr(host_memory, "_process_vm_readv", stops_early)
    source, target = memory(40), np.zeros((40, 7), dtype=np.uint8)
    ids = list(range(0, 40, 2))
    read_memory(os.getpid(), plan_copy(ids, ids, [region(source)], [region(target)]))
    assert np.array_equal(target[::2], source[::2])
    assert not target[1::2].any()


def test_memory_that_is_not_mapped_is_a_transport_failure() -> None:
    target = np.zeros((1, 7), dtype=np.uint8)
    nowhere = Region(4096, 7, 7, 1)
    with pytest.raises(MemoryReadError, match="EFAULT") as failed:
        read_memory(os.getpid(), plan_copy([0], [0], [nowhere], [region(target)]))
    assert failed.value.failure_kind == "transport"


def test_a_process_that_is_gone_is_a_lost_peer() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    target = memory(1)
    with pytest.raises(MemoryReadError, match="that process is gone") as failed:
        read_memory(process.pid, plan_copy([0], [0], [region(target)], [region(target)]))
    assert failed.value.failure_kind == "peer_lost"


def test_the_probe_says_in_words_why_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    array = memory(1)
    assert why_unreadable(os.getpid(), array.ctypes.data) == ""

    def no_rights(*_: int) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(host_memory, "_process_vm_readv", no_rights)
    assert "CAP_SYS_PTRACE" in why_unreadable(os.getpid(), array.ctypes.data)
    monkeypatch.setattr(host_memory, "_process_vm_readv", None)
    assert "ENOSYS" in why_unreadable(os.getpid(), array.ctypes.data)


def test_processes_of_one_machine_have_one_host_id() -> None:
    code = "from kvtransfer.links.host_memory import host_id; print(host_id())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert theirs.stdout.strip() == host_id()
