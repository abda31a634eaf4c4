"""One rank's GPU, as far as the links need it. Only this file and `links/nccl.py` touch cupy and the CUDA driver.

Nothing is imported before a cache on a GPU is registered, so everything else works without a GPU and without cupy.
"""

import ctypes
import importlib
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_IS_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_MEMPOOL_HANDLE = 17  # CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE


class CudaUnusable(RuntimeError):
    """A sentence about what of CUDA cannot be used here, and what to do about it."""


class Event(Protocol):
    """A point in a stream. Asking raises RuntimeError once anything on the device has failed."""

    @property
    def done(self) -> bool: ...


class Stream(Protocol):
    """An ordered queue of work on the device, not ordered with any other."""

    @property
    def ptr(self) -> int: ...


@dataclass(frozen=True)
class Allocation:
    """What one call of an allocator returned."""

    base_address: int
    num_bytes: int
    why_not_shared: str
    """Empty when CUDA IPC can share it with another process."""


@dataclass(frozen=True)
class PinnedBuffer:
    """Host memory that the device can read and write by the same address."""

    array: NDArray[np.uint8]
    address: int
    owner: object
    """Keeps it allocated."""


class CudaDevice:
    """CUDA's calls with our types. Every thread that uses it calls `use` first. CUDA's errors are RuntimeErrors."""

    def __init__(self, ordinal: int, cupy: Any, driver: Any) -> None:
        """`cupy` is the module, `driver` the library libcuda. Raises CudaUnusable without such a device."""
        self.ordinal = ordinal
        self.cupy = cupy
        self._driver = driver
        self._runtime = cupy.cuda.runtime
        try:
            self.use()
            self.name: str = self._runtime.deviceGetPCIBusId(ordinal)
        except RuntimeError as error:
            raise CudaUnusable(
                f"GPU {ordinal} cannot be used: {error}. Check the driver and CUDA_VISIBLE_DEVICES."
            ) from error

    def use(self) -> None:
        """Make this the calling thread's device."""
        self.cupy.cuda.Device(self.ordinal).use()

    def new_stream(self) -> Stream:
        stream: Stream = self.cupy.cuda.Stream(non_blocking=True)
        return stream

    def foreign_stream(self, address: int) -> Stream:
        """A stream that somebody else made, for example torch."""
        stream: Stream = self.cupy.cuda.ExternalStream(address)
        return stream

    def record(self, stream: Stream) -> Event:
        """An event that is done when everything put into `stream` until now is."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        done: Event = event
        return done

    def allocate(self, num_bytes: int) -> int:
        """Device memory outside every pool. Raises CudaUnusable when there is not enough."""
        try:
            return int(self._runtime.malloc(num_bytes))
        except RuntimeError as error:
            raise CudaUnusable(
                f"no {num_bytes / 1e6:.0f} MB of GPU memory for the transfer's buffers: {error}. "
                "Lower gpu_memory_utilization a little."
            ) from error

    def free(self, address: int) -> None:
        """Nothing may be using it any more."""
        self._runtime.free(address)

    def allocate_pinned(self, num_bytes: int) -> PinnedBuffer:
        owner = self.cupy.cuda.alloc_pinned_memory(num_bytes)
        return PinnedBuffer(np.frombuffer(owner, dtype=np.uint8, count=num_bytes), int(owner.ptr), owner)

    def upload(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy from pinned memory in stream order: the source must stay as it is until then."""
        self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyHostToDevice, stream.ptr)

    def compile(self, source: str, name: str) -> Any:
        """A kernel, ready to be launched: compiling takes long enough not to do it during a transfer."""
        kernel = self.cupy.RawKernel(source, name)
        kernel.compile()
        return kernel

    def launch(
        self, kernel: Any, num_blocks: int, num_threads: int, arguments: tuple[Any, ...], stream: Stream
    ) -> None:
        with stream:  # type: ignore[attr-defined]
            kernel((num_blocks,), (num_threads,), arguments)

    # CUDA IPC.

    def allocation_at(self, address: int) -> Allocation:
        """The allocation that `address` lies in. Raises CudaUnusable when there is none."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        where = ctypes.c_uint64(address)
        if status := self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), where):
            raise CudaUnusable(f"no CUDA allocation is known at {address:#x} (driver error {status})")
        capable, pool = ctypes.c_uint(), ctypes.c_void_p()
        status = self._driver.cuPointerGetAttribute(ctypes.byref(capable), _IS_IPC_CAPABLE, where)
        reason = ""
        if status:
            reason = f"the driver cannot tell whether the KV cache can be shared (error {status}); update it"
        elif not capable.value:
            failed = self._driver.cuPointerGetAttribute(ctypes.byref(pool), _MEMPOOL_HANDLE, where)
            is_pool = not failed and bool(pool.value)
            reason = _FROM_POOL if is_pool else _FROM_VIRTUAL_MEMORY
        return Allocation(base.value, size.value, reason)

    def ipc_handle(self, base_address: int) -> bytes:
        """What another process opens to see the allocation."""
        return bytes(self._runtime.ipcGetMemHandle(base_address))

    def open_ipc(self, handle: bytes) -> int:
        """The address, here, of another process's allocation. To be closed as often as it was opened."""
        return int(self._runtime.ipcOpenMemHandle(handle))

    def close_ipc(self, address: int) -> None:
        """Nothing may be reading it any more."""
        self._runtime.ipcCloseMemHandle(address)


_FROM_POOL = (
    "the KV cache was allocated by cudaMallocAsync, whose pools CUDA IPC cannot share. "
    "Remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF"
)
_FROM_VIRTUAL_MEMORY = (
    "the KV cache was allocated as CUDA virtual memory (cuMemCreate), which CUDA IPC cannot share. "
    "Remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF and start without enable_sleep_mode"
)


def open_device(device: str) -> CudaDevice:
    """`cuda:N`, as torch writes it. Raises CudaUnusable naming what is missing."""
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not (ordinal or "0").isdecimal():
        raise CudaUnusable(f"the KV cache is on {device}: only CPUs and CUDA devices are supported.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about libraries that are not there: what we need, we ask for ourselves
            cupy = importlib.import_module("cupy")
            importlib.import_module("cupy.cuda.nccl")
        driver = ctypes.CDLL("libcuda.so.1")
    except ImportError as error:
        raise CudaUnusable(
            f"the KV cache is on {device}, and moving it needs cupy, which cannot be imported: {error}. "
            "Install twinpool with its extra `gpu`."
        ) from error
    except OSError as error:
        raise CudaUnusable(f"the CUDA driver cannot be loaded: {error}. Install the NVIDIA driver.") from error
    return CudaDevice(int(ordinal or 0), cupy, driver)
