"""Two processes with real caches on GPUs: every link they can use, exact, and its speed against cudaMemcpy's."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import probe
from kvtransfer.rank_endpoint import RankEndpoint
from kvtransfer.transfers.imports import ClosedImport
from tests.gpu.gpu_cache import BLOCK_SIZE, FACTS, NUM_BLOCKS, PROMPT_HASH, contents, make_cache
from tests.gpu.speed import ceiling_gb_per_s, report

ROOT = Path(__file__).parents[2]
THEIRS = list(range(1, NUM_BLOCKS))
OURS = THEIRS[::-1]
NUM_TOKENS = len(THEIRS) * BLOCK_SIZE
TRANSFERS = ["first", "second", "third"]

pytestmark = pytest.mark.timeout(240)


class Importer:
    """A rank in this process, on device 0, and the exporter that it knows."""

    def __init__(self, cupy: Any, directory: Path, link: str, is_apart: bool, exporter: subprocess.Popen[str]) -> None:
        self.cupy = cupy
        self.exporter = exporter
        assert exporter.stdout
        self.address, self.epoch = exporter.stdout.readline().split()
        self.cache = make_cache(cupy, 0, is_apart)
        settings = EndpointSettings(rank=0, bind=f"ipc://{directory}/importer", links=(link,), prepare_within_s=60.0)
        self.endpoint = RankEndpoint(settings, probe(self.cache, NUM_BLOCKS, FACTS))
        self.endpoint.meet(self.address, self.epoch)
        until_s = time.monotonic() + 90
        while not self.endpoint.stats().peers and time.monotonic() < until_s:
            time.sleep(0.01)

    def begin(self, transfer: str) -> None:
        self.endpoint.open_import(transfer, self.address, self.epoch, PROMPT_HASH, NUM_TOKENS, False)
        self.endpoint.place_import(transfer, 0, OURS)

    def end(self) -> ClosedImport:
        assert self.endpoint.wait(60.0), "nothing closed within a minute"
        (closed,) = self.endpoint.take_closed_imports()
        return closed

    def clear(self) -> None:
        for array in self.cache.values():
            array[...] = 0
        self.cupy.cuda.runtime.deviceSynchronize()

    def has_everything(self) -> bool:
        return all(
            np.array_equal(self.cupy.asnumpy(array[OURS]), contents(layer, THEIRS))
            for layer, array in enumerate(self.cache.values())
        )


Start = Callable[..., Importer]


@pytest.fixture
def start(cupy: Any, directory: Path) -> Iterator[Start]:
    importers: list[Importer] = []
    exporters: list[subprocess.Popen[str]] = []

    def start(link: str, exporter_device: int = 0, is_apart: bool = False) -> Importer:
        words = [str(directory), str(exporter_device), link, "apart" if is_apart else "together", *TRANSFERS]
        exporters.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.exporter_process", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
        importers.append(Importer(cupy, directory, link, is_apart, exporters[-1]))
        return importers[-1]

    yield start
    for importer in importers:
        importer.endpoint.close()
    for exporter in exporters:
        exporter.kill()
        exporter.communicate(timeout=10)


def check_link(importer: Importer, link: str, exporter_device: int) -> None:
    assert [words.partition(":")[0] for words in importer.endpoint.stats().peers.values()] == [link]
    best = 0.0
    for transfer in TRANSFERS:
        importer.clear()
        started_s = time.perf_counter()
        importer.begin(transfer)
        closed = importer.end()
        wall_s = time.perf_counter() - started_s
        assert (closed.outcome, closed.link, closed.reason) == ("loaded", link, "")
        assert importer.has_everything()
        best = max(best, closed.bytes_moved / wall_s / 1e9)
    report(
        f"link {link}, {closed.bytes_moved / 1e6:.0f} MB",
        best,
        ceiling_gb_per_s(importer.cupy, 256 << 20, exporter_device),
    )


@pytest.mark.parametrize("is_apart", [False, True], ids=["one run a block", "two runs a block"])
@pytest.mark.parametrize("link", ["cuda_ipc", "zmq"])
def test_blocks_arrive_exactly_on_one_gpu(start: Start, link: str, is_apart: bool) -> None:
    check_link(start(link, is_apart=is_apart), link, 0)


@pytest.mark.parametrize("link", ["cuda_ipc", "nccl"])
def test_blocks_arrive_exactly_from_another_gpu(start: Start, num_gpus: int, link: str) -> None:
    if num_gpus < 2:
        pytest.skip(f"needs two GPUs, found {num_gpus}: NCCL allows one rank per GPU")
    check_link(start(link, exporter_device=1), link, 1)


@pytest.mark.parametrize("link", ["cuda_ipc", "nccl"])
def test_an_exporters_death_means_recompute(start: Start, num_gpus: int, link: str) -> None:
    if link == "nccl" and num_gpus < 2:
        pytest.skip(f"needs two GPUs, found {num_gpus}: NCCL allows one rank per GPU")
    importer = start(link, exporter_device=1 if link == "nccl" else 0)
    importer.begin("first")
    importer.exporter.kill()
    closed = importer.end()
    assert closed.outcome == "loaded" or (closed.outcome, closed.failure_kind) == ("recompute", "peer_lost")
    importer.endpoint.check()
