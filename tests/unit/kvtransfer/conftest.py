import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.kvtransfer.rank_pair import Cluster, Rank


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
