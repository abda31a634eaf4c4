"""`cupy.cuda.nccl` between the processes of a `FakeMachine`, with NCCL's own rules.

* Making a communicator blocks until every rank of it has been made, for ever if one never is.
* A send or a receive is work in a stream. It is carried out when it has come to the front of its stream, the other
  rank's counterpart has come to the front of its own, and both are of one size. Anything else hangs: neither
  ends before it is aborted, and nothing behind it in its stream starts.
* Calls between groupStart and groupEnd are put into their streams at groupEnd, and then progress together.
* A rank's death, and its abort, reach the other rank as an error that is only told when asked for, some time later.
* An aborted rank's operations end, leaving garbage where they received. It cannot be used any more.
* One communicator is used by one thread at a time, and two ranks of it cannot share a GPU.
"""

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.unit.kvtransfer.fake_cuda import FakeMachine, FakeProcess, FakeStream, Operation

VERSION = 22703
ERROR_DELAY_S = 0.02
"""Between a rank's death and the moment that the other can know of it."""
_INVALID_USAGE, _REMOTE_ERROR = 5, 6


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL error {status}: fake")
        self.status = status


class _World:
    """What the ranks of one unique id share."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ranks: dict[int, FakeCommunicator] = {}
        self.posted: dict[int, deque[_Message]] = {rank: deque() for rank in range(num_ranks)}
        self.gone_since_s: float | None = None
        self.is_cut = False
        """The network between the ranks is gone."""


class _Message(Operation):
    def __init__(self, communicator: "FakeCommunicator", kind: str, address: int, size: int, peer: int) -> None:
        self.communicator = communicator
        self.kind = kind
        self.address = address
        self.size = size
        self.peer = peer
        self.is_at_front = False
        self.is_matched = False
        self.group: list[_Message] = [self]

    def begin(self) -> bool:
        for message in self.group:
            message.is_at_front = True
        world, rank = self.communicator.world, self.communicator.rank
        if self.communicator.is_aborted:
            if self.kind == "recv":
                self._write(self.communicator.process.machine.garbage(self.size))
            return True
        for message in self.group:
            message.match(world, rank)
        return all(message.is_matched for message in self.group)

    def match(self, world: _World, rank: int) -> None:
        if self.is_matched:
            return
        ours, theirs = world.posted[rank], world.posted[self.peer]
        counterpart = next((it for it in theirs if it.peer == rank and it.kind != self.kind), None)
        is_next = next(it for it in ours if it.kind == self.kind) is self
        if (
            counterpart is None
            or not is_next
            or not counterpart.is_at_front
            or world.is_cut
            or self.size != counterpart.size
            or not counterpart.communicator.process.is_alive
            or counterpart.communicator.is_aborted
        ):
            return
        sender, receiver = (self, counterpart) if self.kind == "send" else (counterpart, self)
        data = sender.communicator.process.view(sender.address, sender.size)
        receiver._write(data)
        for message in (self, counterpart):
            message.is_matched = True
            message.communicator.world.posted[message.communicator.rank].remove(message)
            message.communicator.process.machine.changed.notify_all()

    def _write(self, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self.communicator.process.view(self.address, self.size)[:] = data


class FakeCommunicator:
    """cupy.cuda.nccl.NcclCommunicator."""

    def __init__(
        self, network: "FakeNetwork", process: FakeProcess, num_ranks: int, unique_id: bytes, rank: int
    ) -> None:
        self.process = process
        self.rank = rank
        self.is_aborted = False
        self.device = process.current_device()
        self._network = network
        self._in_use = threading.Lock()
        machine = process.machine
        with machine.changed:
            self.world = network.worlds.setdefault(unique_id, _World(num_ranks))
            self.world.is_cut |= network.is_cut
            if rank in self.world.ranks or not 0 <= rank < num_ranks:
                raise NcclError(_INVALID_USAGE)
            self.world.ranks[rank] = self
            machine.changed.notify_all()
            while len(self.world.ranks) < num_ranks:
                process.check()
                if network.is_closed:
                    raise NcclError(_REMOTE_ERROR)
                machine.changed.wait(timeout=0.01)
        if len({it.device for it in self.world.ranks.values()}) < num_ranks:
            raise NcclError(_INVALID_USAGE)
        network.num_made += 1

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._post("send", address, count, datatype, peer, stream)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._post("recv", address, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        self._use()
        others = [it for it in self.world.ranks.values() if it is not self]
        gone = self.world.is_cut or any(not it.process.is_alive or it.is_aborted for it in others)
        if not gone:
            return
        if self.world.gone_since_s is None:
            self.world.gone_since_s = time.monotonic()
        if time.monotonic() - self.world.gone_since_s >= ERROR_DELAY_S:
            raise NcclError(_REMOTE_ERROR)

    def abort(self) -> None:
        """The one call that another thread may make while an operation hangs."""
        self.process.check()
        with self.process.machine.changed:
            self.is_aborted = True
            self._network.num_aborted += 1
            self.process.machine.changed.notify_all()

    def destroy(self) -> None:
        raise AssertionError("destroying a communicator waits for its operations, which may never end: abort it")

    def _use(self) -> None:
        self.process.check()
        if self.is_aborted:
            raise AssertionError("an aborted communicator was used: NCCL has freed it")

    def _post(self, kind: str, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert datatype == 1, "bytes"
        assert peer != self.rank
        assert self._in_use.acquire(blocking=False), "two threads use a communicator at once"
        try:
            self._use()
            message = _Message(self, kind, address, count, peer)
            self._network.num_sent += kind == "send"
            group: list[tuple[FakeStream, _Message]] | None = getattr(self.process.thread_state, "group", None)
            if group is None:
                with self.process.machine.changed:
                    self.world.posted[self.rank].append(message)
                    self.process.streams[stream].put(message)
            else:
                group.append((self.process.streams[stream], message))
        finally:
            self._in_use.release()


class FakeNetwork:
    """Gives processes their `cupy.cuda.nccl`. Old cupy has unique ids of signed numbers, new cupy bytes."""

    def __init__(self, machine: FakeMachine, old_cupy: bool = False) -> None:
        self.worlds: dict[bytes, _World] = {}
        self.num_made = 0
        self.num_aborted = 0
        self.num_sent = 0
        self.is_closed = False
        self.is_cut = False
        """Whatever is made from now on carries nothing."""
        self._machine = machine
        self._old_cupy = old_cupy

    def connect(self, process: FakeProcess, version: int = VERSION) -> None:
        """Have `process` import it."""
        nccl = SimpleNamespace(
            available=True,
            NCCL_UINT8=1,
            NcclError=NcclError,
            get_version=lambda: version,
            get_unique_id=self._new_id,
            NcclCommunicator=lambda *arguments: self._communicator(process, *arguments),
            groupStart=lambda: self._start_group(process),
            groupEnd=lambda: self._end_group(process),
        )
        if not self._old_cupy:
            nccl.NcclConfig = object
        process.cuda.nccl = nccl

    def cut(self) -> None:
        """What is connected now carries nothing more; what is made later does."""
        for world in self.worlds.values():
            world.is_cut = True

    def close(self) -> None:
        """Let go of whoever still waits for another rank."""
        self.is_closed = True

    def _new_id(self) -> bytes | tuple[int, ...]:
        unique_id = self._machine.garbage(128)
        return tuple(unique_id.view(np.int8).tolist()) if self._old_cupy else unique_id.tobytes()

    def _communicator(
        self, process: FakeProcess, num_ranks: int, unique_id: bytes | tuple[int, ...], rank: int
    ) -> FakeCommunicator:
        assert isinstance(unique_id, tuple) == self._old_cupy
        assert len(unique_id) == 128
        on_wire = unique_id if isinstance(unique_id, bytes) else np.array(unique_id, dtype=np.int8).tobytes()
        return FakeCommunicator(self, process, num_ranks, on_wire, rank)

    def _start_group(self, process: FakeProcess) -> None:
        assert getattr(process.thread_state, "group", None) is None
        process.thread_state.group = []

    def _end_group(self, process: FakeProcess) -> None:
        group: list[tuple[FakeStream, _Message]] = process.thread_state.group
        process.thread_state.group = None
        messages = [message for _, message in group]
        with process.machine.changed:
            for _, message in group:
                message.group = messages
                message.communicator.world.posted[message.communicator.rank].append(message)
            for stream, message in group:
                stream.put(message)
