"""The limits: what the machine does without any protocol."""

import ctypes
import importlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvtransfer.links.host_memory import allow_reading
from lab.links.arms.block_cache import BlockCache, piece_addresses
from lab.links.arms.kinds import ArmFailed, ArmUnusable, ExporterSide, ImporterSide, Offers, Site
from lab.links.messages import Transfer
from lab.links.work import in_place

_IOV_MAX = 1024
_libc = ctypes.CDLL(None, use_errno=True)


class NothingToOffer(ExporterSide):
    """The exporter's side of a copy that stays in the importer's process."""

    def __init__(self, site: Site) -> None: ...


class Readable(ExporterSide):
    """Memory that another process reads."""

    def __init__(self, site: Site) -> None:
        allow_reading()
        self.offers = {"pid": str(os.getpid()), "addresses": ",".join(map(str, site.cache.layer_addresses))}


class _InPlace(ImporterSide):
    def __init__(self, site: Site) -> None:
        self.cache = site.cache

    def effective(self, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        return [in_place(self.cache.num_blocks, transfers[0].name)]


class Memcpy(_InPlace):
    """One thread copies layer after layer, each in one call, from memory of its own."""

    def __init__(self, site: Site, offers: Offers) -> None:
        super().__init__(site)
        self._source = BlockCache(site.cache.shape, site.cache.num_blocks)
        self._source.fill()

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        num_bytes = self.cache.layer_bytes
        started_s = time.perf_counter()
        for target, source in zip(self.cache.layer_addresses, self._source.layer_addresses, strict=True):
            ctypes.memmove(target, source, num_bytes)
        return time.perf_counter() - started_s


class CudaMemcpy(_InPlace):
    """The same between GPUs, or on one."""

    def __init__(self, site: Site, offers: Offers) -> None:
        super().__init__(site)
        self._cupy = importlib.import_module("cupy")
        num_gpus = self._cupy.cuda.runtime.getDeviceCount()
        with self._cupy.cuda.Device(min(1, num_gpus - 1)):
            self._source = BlockCache(site.cache.shape, site.cache.num_blocks, self._cupy)
            self._source.fill()

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        runtime, num_bytes = self._cupy.cuda.runtime, self.cache.layer_bytes
        started_s = time.perf_counter()
        for target, source in zip(self.cache.layer_addresses, self._source.layer_addresses, strict=True):
            runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDefault, 0)
        runtime.deviceSynchronize()
        return time.perf_counter() - started_s


class ReadLoop(ImporterSide):
    """`process_vm_readv` of 1,024 pieces a call; the lists of pieces are made before the clock starts."""

    def __init__(self, site: Site, offers: Offers) -> None:
        if not hasattr(_libc, "process_vm_readv"):
            raise ArmUnusable("this system has no process_vm_readv")
        self._cache = site.cache
        self._pid = int(offers["pid"])
        self._addresses = [int(address) for address in offers["addresses"].split(",")]
        self._read = _libc.process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        source_ids = list(itertools.chain.from_iterable(transfer.source_ids for transfer in transfers))
        target_ids = list(itertools.chain.from_iterable(transfer.target_ids for transfer in transfers))
        shape = self._cache.shape
        remote = piece_addresses(self._addresses, shape, source_ids).ravel()
        local = self._cache.piece_addresses(target_ids).ravel()
        lengths = np.full(len(local), shape.piece_bytes, dtype=np.uint64)
        local_pieces = np.stack((local, lengths), axis=1)  # struct iovec [piece]
        remote_pieces = np.stack((remote, lengths), axis=1)
        calls = []
        for first in range(0, len(local), _IOV_MAX):
            count = min(_IOV_MAX, len(local) - first)
            here, there = local_pieces[first:].ctypes.data, remote_pieces[first:].ctypes.data
            calls.append((self._pid, here, count, there, count, 0))
        num_read = 0
        started_s = time.perf_counter()
        for call in calls:
            num_read += self._read(*call)
        seconds = time.perf_counter() - started_s
        if num_read != int(lengths.sum()):
            raise ArmFailed(
                f"process_vm_readv read {num_read} of {lengths.sum()} bytes: {os.strerror(ctypes.get_errno())}"
            )
        return seconds


class StreamSender(ExporterSide):
    """Sends the whole cache, layer after layer, whenever a byte arrives."""

    def __init__(self, site: Site) -> None:
        self._layers = [memoryview(layer).cast("B") for layer in site.cache.layers]
        self._server = socket.create_server(("127.0.0.1", 0))
        self.offers = {"port": str(self._server.getsockname()[1])}
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                for layer in self._layers:
                    connection.sendall(layer)


class StreamReceiver(_InPlace):
    """One thread reads the stream straight into the cache."""

    def __init__(self, site: Site, offers: Offers) -> None:
        super().__init__(site)
        self._layers = [memoryview(layer).cast("B") for layer in site.cache.layers]
        self._socket = socket.create_connection(("127.0.0.1", int(offers["port"])))

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        self._socket.settimeout(timeout_s)
        started_s = time.perf_counter()
        self._socket.sendall(b"x")
        for layer in self._layers:
            num_read = 0
            while num_read < len(layer):
                if not (count := self._socket.recv_into(layer[num_read:])):
                    raise ArmFailed("the sender closed the connection")
                num_read += count
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._socket.close()
