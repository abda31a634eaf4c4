import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.kvtransfer import rank_process
from tests.unit.kvtransfer.rank_pair import Cluster, Rank

ROOT = Path(__file__).parents[3]
Spawn = Callable[..., tuple[subprocess.Popen[str], str, str]]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for the path of an ipc socket, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="kv"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cluster(directory: Path) -> Iterator[Cluster]:
    cluster = Cluster(directory)
    yield cluster
    cluster.close()


@pytest.fixture(params=["host", "zmq"])
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(cluster: Cluster, link: str) -> tuple[Rank, Rank]:
    """An exporter and an importer, for each link."""
    return cluster.rank(links=(link,)), cluster.rank(links=(link,))


@pytest.fixture
def spawn(directory: Path) -> Iterator[Spawn]:
    """Starts `rank_process.py`; returns the process, its address and its epoch."""
    processes: list[subprocess.Popen[str]] = []

    def start(link: str, role: str, *exporter: str) -> tuple[subprocess.Popen[str], str, str]:
        script = str(rank_process.__file__)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, script, str(directory), link, role, *exporter],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        assert process.stdout
        address, epoch = process.stdout.readline().split()
        return process, address, epoch

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=5)
