"""A machine with GPUs that runs on none: what the links use of cupy and libcuda, with CUDA's own rules.

* Streams are queues. Nothing in them has happened when a call returns: a thread of the machine carries it out later,
  in the order within a stream and in any order between streams. Events and stream waits are the only way to know.
* While an operation writes, its target holds garbage. Pinned memory is read when an upload is carried out, not before.
* Memory belongs to a process. Another one sees it only through an IPC handle, which the process that made it cannot
  open, which works only for allocations of cudaMalloc, and which must be closed as often as it was opened.
* Errors surface later: an access outside every allocation fails whatever is asked of that process's device next.

A test has several processes, `FakeMachine.process`, in one. Each has a module to use as `cupy`, and a `driver`.
"""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

DEVICE_ADDRESSES = 0x7F00_0000_0000
_INVALID_VALUE = 1


class CUDARuntimeError(RuntimeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: fake")


@dataclass
class Memory:
    """One allocation, and who may see it where."""

    data: Bytes
    kind: str = "malloc"  # or `pool`, `virtual`, `pinned`
    owner: "FakeProcess | None" = None
    is_freed: bool = False


class Operation:
    """Something in a stream. `begin` may refuse, and is asked again later; `finish` comes some time after it."""

    def begin(self) -> bool:
        return True

    def finish(self) -> None:
        return


@dataclass
class _Copy(Operation):
    process: "FakeProcess"
    pieces: Callable[[], list[tuple[int, int, int]]]  # source, target, bytes; known only when it is carried out
    _sources: list[tuple[Bytes, Bytes]] = field(default_factory=list)

    def begin(self) -> bool:
        views = self.process.view
        self._sources = [(views(source, size).copy(), views(target, size)) for source, target, size in self.pieces()]
        for _, target in self._sources:
            target[:] = self.process.machine.garbage(target.nbytes)
        return True

    def finish(self) -> None:
        for source, target in self._sources:
            target[:] = source


class FakeStream:
    """cupy.cuda.Stream and ExternalStream."""

    def __init__(self, process: "FakeProcess", device: int) -> None:
        self.process = process
        self.device = device
        self.operations: deque[Operation] = deque()
        self.begun: Operation | None = None
        self.is_held = False
        self.ptr = process.machine.next_address(8)
        self._outer: FakeStream | None = None
        process.streams[self.ptr] = self

    def put(self, operation: Operation) -> None:
        self.process.check()
        with self.process.machine.changed:
            self.operations.append(operation)
            self.process.machine.changed.notify_all()

    def wait_event(self, event: "FakeEvent") -> None:
        self.put(_Wait(event))

    def __enter__(self) -> "FakeStream":
        self._outer = getattr(self.process.thread_state, "stream", None)
        self.process.thread_state.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        self.process.thread_state.stream = self._outer


@dataclass
class _Record(Operation):
    event: "FakeEvent"
    number: int

    def finish(self) -> None:
        self.event.completed = max(self.event.completed, self.number)


@dataclass
class _Wait(Operation):
    event: "FakeEvent"

    def begin(self) -> bool:
        return self.event.completed >= self.event.recorded


class FakeEvent:
    """cupy.cuda.Event."""

    def __init__(self, process: "FakeProcess") -> None:
        self.process = process
        self.recorded = 0
        self.completed = 0

    def record(self, stream: FakeStream) -> None:
        self.recorded += 1
        stream.put(_Record(self, self.recorded))

    @property
    def done(self) -> bool:
        self.process.check()
        return self.completed >= self.recorded


class FakePinned(bytearray):
    """What cupy.cuda.alloc_pinned_memory returns: a buffer with an address."""

    ptr: int


def _new_pinned(process: "FakeProcess", num_bytes: int) -> FakePinned:
    process.check()
    pinned = FakePinned(process.machine.garbage(num_bytes))
    data = np.frombuffer(pinned, dtype=np.uint8)
    pinned.ptr = data.ctypes.data
    process.memories[pinned.ptr] = Memory(data, "pinned", process)
    return pinned


class FakeKernel:
    """cupy.RawKernel for the one kernel there is, carried out by numpy."""

    def __init__(self, process: "FakeProcess", source: str, name: str) -> None:
        assert f"void {name}(" in source
        self._process = process
        self._is_compiled = False

    def compile(self) -> None:
        self._is_compiled = True

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert self._is_compiled, "compiling takes long: not while blocks are on their way"
        assert 0 < grid[0] < 1 << 31
        assert 0 < block[0] <= 1024
        assert [type(argument) for argument in arguments] == [np.uint64, np.uint32, np.uint32]
        address, count, num_tiles = (int(argument) for argument in arguments)

        def pieces() -> list[tuple[int, int, int]]:
            listed = self._process.view(address, count * 32).view(np.uint64).reshape(4, count)
            tiles = -(-listed[2].astype(np.int64) // 16384)
            assert listed[3].tolist() == (np.cumsum(tiles) - tiles).tolist()
            assert num_tiles == tiles.sum()
            return list(zip(*listed[:3].tolist(), strict=True))

        self._process.current_stream().put(_Copy(self._process, pieces))


class FakeProcess:
    """One process. `cupy` and `driver` are what `CudaDevice` takes."""

    def __init__(self, machine: "FakeMachine", pid: int) -> None:
        self.machine = machine
        self.pid = pid
        self.is_alive = True
        self.memories: dict[int, Memory] = {}  # what it can address, by base address
        self.opened: dict[int, int] = {}  # IPC mappings: address -> how often opened
        self.streams: dict[int, FakeStream] = {}
        self.error: CUDARuntimeError | None = None
        self.thread_state = threading.local()
        runtime = SimpleNamespace(
            malloc=self.malloc,
            free=self._free,
            memcpyAsync=self._memcpy_async,
            memcpyHostToDevice=1,
            deviceGetPCIBusId=self._bus_id,
            ipcGetMemHandle=self._get_handle,
            ipcOpenMemHandle=self._open_handle,
            ipcCloseMemHandle=self._close_handle,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda ordinal: SimpleNamespace(use=lambda: self._use(ordinal)),
            Stream=self._new_stream,
            ExternalStream=lambda address: self.streams[address],
            Event=self._new_event,
            alloc_pinned_memory=lambda num_bytes: _new_pinned(self, num_bytes),
            nccl=SimpleNamespace(available=False),
        )
        self.cupy = SimpleNamespace(cuda=self.cuda, RawKernel=lambda source, name: FakeKernel(self, source, name))
        self.driver = SimpleNamespace(
            cuMemGetAddressRange_v2=self._address_range, cuPointerGetAttribute=self._pointer_attribute
        )

    def check(self) -> None:
        """Every call of CUDA tells of errors of calls before."""
        if not self.is_alive:
            raise SystemExit  # a thread of a dead process does nothing any more
        if self.error:
            raise self.error

    def view(self, address: int, size: int) -> Bytes:
        """The bytes there; the device faults when there are none."""
        for base, memory in list(self.memories.items()):
            if base <= address and address + size <= base + memory.data.nbytes and not memory.is_freed:
                return memory.data[address - base : address - base + size]
        self.error = CUDARuntimeError("cudaErrorIllegalAddress")
        return np.empty(size, dtype=np.uint8)

    def array(self, shape: tuple[int, ...], kind: str = "malloc", device: int = 0) -> "FakeArray":
        """Like a cupy array of bytes, with anything in it."""
        return FakeArray(self, self.malloc(int(np.prod(shape)), kind), shape, device)

    def malloc(self, size: int, kind: str = "malloc") -> int:
        self.check()
        address = self.machine.next_address(size)
        self.memories[address] = Memory(self.machine.garbage(size), kind, self)
        return address

    def current_stream(self) -> FakeStream:
        stream = getattr(self.thread_state, "stream", None)
        assert stream is not None, "a launch into the default stream, which waits for everything else"
        assert isinstance(stream, FakeStream)
        return stream

    def kill(self) -> None:
        """SIGKILL: what it had in its streams stops, its memory goes."""
        with self.machine.changed:
            self.is_alive = False
            for memory in list(self.memories.values()):
                if memory.owner is self and memory.kind != "pinned":
                    memory.data[:] = self.machine.garbage(memory.data.nbytes)
            self.machine.changed.notify_all()

    def current_device(self) -> int:
        device = getattr(self.thread_state, "device", None)
        assert device is not None, "a thread uses CUDA without having chosen its device"
        return int(device)

    def _use(self, ordinal: int) -> None:
        if ordinal >= self.machine.num_devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice")
        self.thread_state.device = ordinal

    def _bus_id(self, ordinal: int) -> str:
        return f"0000:{ordinal:02X}:00.0"

    def _new_stream(self, non_blocking: bool = False) -> FakeStream:
        self.check()
        assert non_blocking, "a blocking stream waits for the engine's default stream, and makes it wait"
        return FakeStream(self, self.current_device())

    def _new_event(self, disable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def _free(self, address: int) -> None:
        self.check()
        self.memories[address].is_freed = True

    def _memcpy_async(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 1
        assert self.memories[source].kind == "pinned", "from pageable memory it would block"
        self.streams[stream].put(_Copy(self, lambda: [(source, target, size)]))

    def _get_handle(self, address: int) -> bytes:
        self.check()
        memory = self.memories.get(address)
        if memory is None or memory.kind != "malloc" or memory.owner is not self:
            raise CUDARuntimeError("cudaErrorInvalidValue")
        handle = address.to_bytes(8, "little") + self.pid.to_bytes(8, "little")
        return handle.ljust(64, b"\0")

    def _open_handle(self, handle: bytes) -> int:
        self.check()
        address, pid = (int.from_bytes(handle[at : at + 8], "little") for at in (0, 8))
        exporter = self.machine.processes.get(pid)
        if pid == self.pid or exporter is None or not exporter.is_alive or address not in exporter.memories:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle" if pid != self.pid else "cudaErrorInvalidContext")
        memory = exporter.memories[address]
        for here, known in list(self.memories.items()):
            if known is memory:
                self.opened[here] += 1
                return here
        here = self.machine.next_address(memory.data.nbytes)
        self.memories[here] = memory
        self.opened[here] = 1
        return here

    def _close_handle(self, address: int) -> None:
        self.check()
        if address not in self.opened:
            raise CUDARuntimeError("cudaErrorInvalidValue")
        self.opened[address] -= 1
        if not self.opened[address]:
            del self.opened[address], self.memories[address]

    def _address_range(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        for first, memory in list(self.memories.items()):
            if first <= address.value < first + memory.data.nbytes:
                base._obj.value, size._obj.value = first, memory.data.nbytes
                return 0
        return _INVALID_VALUE

    def _pointer_attribute(self, value: Any, attribute: int, address: ctypes.c_uint64) -> int:
        for first, memory in list(self.memories.items()):
            if first <= address.value < first + memory.data.nbytes:
                value._obj.value = {10: memory.kind == "malloc", 17: 1 if memory.kind == "pool" else None}[attribute]
                return 0
        return _INVALID_VALUE


class FakeArray:
    """A contiguous cupy array of bytes."""

    itemsize = 1

    def __init__(self, process: FakeProcess, address: int, shape: tuple[int, ...], device: int) -> None:
        self.shape = shape
        self.strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        self.device = SimpleNamespace(id=device)
        self.address = address
        self.process = process
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "strides": None, "version": 3}

    def bytes_now(self) -> Bytes:
        """What is there at this moment, complete or not. [shape]"""
        return self.process.view(self.address, int(np.prod(self.shape))).reshape(self.shape)


class FakeMachine:
    """Its thread is the hardware. `pause` stops it, `step` does one thing, `close` ends it."""

    def __init__(self, num_devices: int = 1, seed: int = 0) -> None:
        self.num_devices = num_devices
        self.processes: dict[int, FakeProcess] = {}
        self.changed = threading.Condition(threading.RLock())
        self.is_paused = False
        self.is_closed = False
        self._random = random.Random(seed)
        # Other noise for every allocation would take a tenth of these tests' time: it begins in another place.
        self._noise = np.random.default_rng(seed).integers(0, 256, 1 << 16, dtype=np.uint8)
        self._noise_start = 0
        self._next_address = DEVICE_ADDRESSES
        self._thread = threading.Thread(target=self._run, name="fake-gpus", daemon=True)
        self._thread.start()

    def process(self, pid: int) -> FakeProcess:
        process = self.processes[pid] = FakeProcess(self, pid)
        return process

    def garbage(self, size: int) -> Bytes:
        with self.changed:
            self._noise_start = (self._noise_start + 4099) % (self._noise.size // 2)
            start = self._noise_start
        return np.resize(self._noise[start:], size)

    def next_address(self, size: int) -> int:
        """Aligned as cudaMalloc does, with a gap behind every allocation."""
        with self.changed:
            address = self._next_address
            self._next_address += -(-size // 512) * 512 + 512
            return address

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.changed:
            self.is_paused = True
        yield
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()

    @contextmanager
    def holding(self, streams: Iterable[FakeStream]) -> Iterator[None]:
        """Nothing in these happens meanwhile."""
        held = list(streams)
        for stream in held:
            stream.is_held = True
        yield
        with self.changed:
            for stream in held:
                stream.is_held = False
            self.changed.notify_all()

    def step(self) -> bool:
        """Let one stream, at random, advance by one operation's beginning or end. False when none can."""
        with self.changed:
            streams = [
                stream
                for process in self.processes.values()
                if process.is_alive
                for stream in list(process.streams.values())
                if not stream.is_held and (stream.begun or stream.operations)
            ]
            self._random.shuffle(streams)
            return any(self._advance(stream) for stream in streams)

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        self._thread.join(timeout=5)

    def _advance(self, stream: FakeStream) -> bool:
        if stream.begun:
            stream.begun.finish()
            stream.begun = None
            return True
        if stream.operations[0].begin():
            stream.begun = stream.operations.popleft()
            return True
        return False

    def _run(self) -> None:
        while True:
            with self.changed:
                if self.is_closed:
                    return
                if self.is_paused or not self.step():
                    self.changed.wait()
