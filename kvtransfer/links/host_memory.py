"""Link `host`: read another process's blocks straight into ours, with one system call per 1,024 pieces (Linux)."""

import ctypes
import errno
import os
from pathlib import Path

import numpy as np

from kvtransfer.copy_plan import Addresses, CopyPlan

_IOV_MAX = 1024  # pieces per call, a limit of the kernel
_CALL_MAX_BYTES = 1 << 30  # the kernel stops short of 2 GiB; stay clear of it
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_process_vm_readv = getattr(_libc, "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


class MemoryReadError(OSError):
    """A read that failed; `failure_kind` is one of `messages.FAILURE_KINDS`. What was to be filled holds anything."""

    def __init__(self, pid: int, error_number: int) -> None:
        name = errno.errorcode.get(error_number, str(error_number))
        meaning = _MEANINGS.get(error_number, os.strerror(error_number))
        super().__init__(error_number, f"reading the memory of process {pid} failed with {name}: {meaning}")
        self.failure_kind = "peer_lost" if error_number == errno.ESRCH else "transport"

    def __str__(self) -> str:
        return str(self.args[1])


_MEANINGS = {
    errno.EPERM: (
        "this process may not trace that one. Run both as one user, and allow it with CAP_SYS_PTRACE or "
        "`sysctl kernel.yama.ptrace_scope=0`; without that the link `zmq` is used"
    ),
    errno.ESRCH: "that process is gone",
    errno.EFAULT: "the blocks are not mapped there any more",
    errno.ENOSYS: "this kernel or sandbox has no process_vm_readv; the link `zmq` is used",
    errno.ENOMEM: "the kernel is out of memory",
}


def read_memory(pid: int, plan: CopyPlan) -> None:
    """Fill the plan's targets, in this process, from its sources, in process `pid`. Raises MemoryReadError."""
    for first in range(0, len(plan), _IOV_MAX):
        piece = slice(first, first + _IOV_MAX)
        _read_some(pid, plan.sources[piece].copy(), plan.targets[piece].copy(), plan.lengths[piece].copy())


def why_unreadable(pid: int, address: int) -> str:
    """Why this process cannot read a byte at `address` of process `pid`; empty when it can."""
    byte = np.empty(1, dtype=np.uint8)
    one = np.ones(1, dtype=np.uint64)
    try:
        read_memory(pid, CopyPlan(one * np.uint64(address), one * np.uint64(byte.ctypes.data), one))
    except MemoryReadError as error:
        return str(error)
    return ""


def allow_reading() -> None:
    """Let processes of this user read this one's memory where Yama would let only its ancestors (no-op elsewhere)."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def host_id() -> str:
    """Equal in two processes that run on one machine and mean the same process by one pid."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}"


def _read_some(pid: int, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
    """Read at most `_IOV_MAX` pieces; the kernel may stop anywhere, so go on from there. Changes its arguments."""
    if _process_vm_readv is None:
        raise MemoryReadError(pid, errno.ENOSYS)
    first = 0
    while first < len(lengths):
        ends = np.cumsum(lengths[first:])
        count = max(1, int(np.searchsorted(ends, _CALL_MAX_BYTES, side="right")))
        here = slice(first, first + count)
        local = np.stack((targets[here], lengths[here]), axis=1)  # struct iovec [piece]
        remote = np.stack((sources[here], lengths[here]), axis=1)
        num_read = _process_vm_readv(pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
        if num_read <= 0:
            raise MemoryReadError(pid, ctypes.get_errno() if num_read < 0 else errno.EFAULT)
        num_whole = int(np.searchsorted(ends, num_read, side="right"))
        first += num_whole
        if num_whole < count:
            rest = np.uint64(num_read - (int(ends[num_whole - 1]) if num_whole else 0))
            sources[first] += rest
            targets[first] += rest
            lengths[first] -= rest
