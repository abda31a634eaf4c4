"""A cluster with spare workers: whoever is killed is replaced by one that was frozen until then."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.launches import twinpool
from lab.server_process import Server, free_port
from tests.chaos.spares import SparedCluster
from tests.engine.conftest import PromptMaker as PromptMaker
from tests.engine.conftest import log_dir as log_dir
from tests.engine.conftest import make_prompt as make_prompt
from tests.engine.conftest import model_path as model_path
from tests.engine.servers import cluster_config

WORKERS_PER_POOL = 3


@pytest.fixture(scope="session")
def spared_cluster(model_path: str, log_dir: Path) -> Iterator[SparedCluster]:
    """3P3D of which one pair works; without limits that would hide what a death does."""
    config = cluster_config(model_path, free_port())
    for pool in config["pools"].values():
        pool["replicas"] = WORKERS_PER_POOL
    config["pools"]["decode"]["engine"]["max_num_seqs"] = 2
    server = Server(twinpool("cluster-chaos", config, log_dir), log_dir)
    try:
        server.wait_until_healthy()
        yield SparedCluster(server)
    finally:
        server.stop()
