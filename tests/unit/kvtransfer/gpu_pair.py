"""Ranks with caches on the GPUs of a `FakeMachine`, talking over real sockets.

Each has a process of its own, whose life is that of a `sleep`, so that its death is noticed as usual.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.gpu.device import CudaDevice
from kvtransfer.layout import ModelFacts, probe
from kvtransfer.rank_endpoint import RankEndpoint
from tests.unit.kvtransfer.fake_cuda import FakeArray, FakeMachine, FakeProcess
from tests.unit.kvtransfer.fake_nccl import FakeNetwork
from tests.unit.kvtransfer.rank_pair import FACTS, NUM_BLOCKS, NUM_LAYERS, Cluster, Rank, eventually

RUN_BYTES = 1024
BLOCK_SHAPE = (2, RUN_BYTES)  # of one layer


class GpuRank(Rank):
    """`cache` is of fake arrays [block, 2, 1024]; with `kind="apart"` the two halves of a block are two runs."""

    def __init__(self, process: FakeProcess, child: subprocess.Popen[bytes], arrays: list[FakeArray]) -> None:
        self.process = process
        self.child = child
        self.arrays = arrays
        self.closed_imports = []
        self.closed_exports = []

    def start(self, settings: EndpointSettings, facts: ModelFacts = FACTS) -> None:
        cache = {f"layers.{layer}.attention": array for layer, array in enumerate(self.arrays)}
        self.map = probe(cache, NUM_BLOCKS, facts)
        self.endpoint = RankEndpoint(settings, self.map)

    def blocks(self, block_ids: list[int]) -> Any:
        """[layer, block, 2, 1024]"""
        return np.stack([array.bytes_now()[block_ids] for array in self.arrays])

    def holds(self, block_ids: list[int], exporter: Rank, their_ids: list[int]) -> bool:
        assert isinstance(exporter, GpuRank)
        return np.array_equal(self.blocks(block_ids), exporter.blocks(their_ids))

    def kill(self) -> None:
        """SIGKILL: neither its threads nor its GPU nor its sockets do anything more."""
        self.process.kill()
        self.child.kill()
        self.child.wait(timeout=5)
        gpu = self.endpoint._gpu
        assert gpu
        gpu._thread.post(self.process.check)
        self.endpoint._thread.join(timeout=5)


class GpuCluster:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **fake: Any) -> None:
        self.machine = FakeMachine(num_devices=4)
        self.network = FakeNetwork(self.machine, **fake)
        self.ranks: list[GpuRank] = []
        self._cluster = Cluster(directory)
        self._monkeypatch = monkeypatch
        self._starting: GpuRank | None = None
        monkeypatch.setattr("kvtransfer.gpu.gpu_links.open_device", self._open_device)
        monkeypatch.setattr("kvtransfer.rank_endpoint.os", SimpleNamespace(getpid=self._getpid))

    def rank(
        self,
        device: int = 0,
        kind: str = "malloc",
        nccl_version: int = 22703,
        block_shape: tuple[int, ...] = BLOCK_SHAPE,
        facts: ModelFacts = FACTS,
        **changes: Any,
    ) -> GpuRank:
        child = subprocess.Popen(["sleep", "60"])
        process = self.machine.process(child.pid)
        self.network.connect(process, nccl_version)
        process.cuda.Device(device).use()
        arrays = [process.array((NUM_BLOCKS, *block_shape), kind, device) for _ in range(NUM_LAYERS)]
        rank = GpuRank(process, child, arrays)
        self._starting = rank
        patient = {"attach_wait_s": 5.0, "stalled_after_s": 5.0, "peer_lost_after_s": 5.0}  # many threads on few cores
        links = ("cuda_ipc", "nccl", "zmq")
        settings = self._cluster.settings(**{"chunk_bytes": 4096, "links": links, **patient, **changes})
        rank.start(replace(settings, prepare_within_s=changes.get("prepare_within_s", 10.0)), facts)
        self.ranks.append(rank)
        return rank

    @contextmanager
    def closing(self) -> Iterator["GpuCluster"]:
        try:
            yield self
        finally:
            self.network.close()
            for rank in self.ranks:
                if rank.process.is_alive:
                    rank.endpoint.close(timeout_s=1)
                rank.child.kill()
                rank.child.wait(timeout=5)
            self._cluster.close()
            self.machine.close()

    def _open_device(self, name: str) -> CudaDevice:
        assert self._starting
        process = self._starting.process
        return CudaDevice(int(name.removeprefix("cuda:")), process.cupy, process.driver)

    def _getpid(self) -> int:
        assert self._starting
        return self._starting.process.pid


def link_of(rank: Rank) -> str:
    """The link to the one exporter that this rank knows, and why, once that is settled."""
    eventually(lambda: rank.endpoint.stats().peers)
    (words,) = rank.endpoint.stats().peers.values()
    return words
