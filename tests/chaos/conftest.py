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

REPLICAS = {"prefill": 3, "decode": 4}
"""Three of each are killed or drained; one more decode worker takes the other role and serves while they are."""


@pytest.fixture(scope="session")
def spared_cluster(model_path: str, log_dir: Path) -> Iterator[SparedCluster]:
    """3P4D of which few work at a time; D is small, so that requests wait there."""
    config = cluster_config(model_path, free_port())
    for role, replicas in REPLICAS.items():
        config["pools"][role]["replicas"] = replicas
    config["restart"] = "never"  # the dead are missed by the tests that follow
    # However fast this machine is: no prompt is late, and none fits between two steps. So no decode worker computes one
    # because a prefill worker stands still.
    config["slo"] = {"ttft_s": 600.0, "itl_s": 0.02}
    config["pools"]["decode"]["engine"] |= {"max_num_seqs": 2, "num_gpu_blocks_override": 64}
    server = Server(twinpool("cluster-chaos", config, log_dir), log_dir)
    try:
        server.wait_until_healthy()
        yield SparedCluster(server)
    finally:
        server.stop()
