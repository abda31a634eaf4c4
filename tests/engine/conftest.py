"""Servers that live as long as the test session, each started when the first test asks for it."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from cluster.embedded_model import ensure_embedded_model
from lab.load.text import prompt_of
from lab.server_process import Server, free_port
from tests.engine.golden import Golden, record
from tests.engine.servers import cluster_config, single_vllm
from tests.engine.shared_cluster import SharedCluster

MODEL_OVERRIDE = "TWINPOOL_TEST_MODEL"
"""A directory with a converted model, instead of the one in the user's cache."""
GOLDEN_FILE = "TWINPOOL_TEST_GOLDEN"
"""For whoever works on the product: a file to keep the yardstick's replies in, read if it is there."""

PromptMaker = Callable[[int, int], list[int]]


@pytest.fixture(scope="session")
def model_path() -> str:
    override = os.environ.get(MODEL_OVERRIDE)
    return override or str(asyncio.run(ensure_embedded_model(lambda _step: None)))


@pytest.fixture(scope="session")
def log_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Logs and configurations of the servers; kept when a test failed."""
    path = Path(tempfile.mkdtemp(prefix="twinpool-test-"))
    yield path
    if not request.session.testsfailed:
        shutil.rmtree(path)


@pytest.fixture(scope="session")
def make_prompt(model_path: str) -> PromptMaker:
    """(seed, num_tokens) to token ids."""
    tokenizer = Tokenizer.from_file(f"{model_path}/tokenizer.json")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return lambda seed, num_tokens: prompt_of(encode, seed, num_tokens)


@pytest.fixture(scope="session")
def host_shared(model_path: str, log_dir: Path) -> Iterator[SharedCluster]:
    shared = SharedCluster(
        "cluster-host", lambda port: cluster_config(model_path, port, transfer={"links": ["host"]}), log_dir
    )
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def zmq_shared(model_path: str, log_dir: Path) -> Iterator[SharedCluster]:
    def configure(port: int) -> dict[str, Any]:
        config = cluster_config(model_path, port, transfer={"links": ["zmq"], "announce_layers": 6})
        config["server"]["options"] |= {"api_key": "sesame", "enable_scale_out": True}
        return config

    shared = SharedCluster("cluster-zmq", configure, log_dir)
    yield shared
    shared.stop()


@pytest.fixture
def cluster(host_shared: SharedCluster) -> Server:
    """1P1D over link `host`, every prompt prefilled remotely; idle when a test gets it."""
    return host_shared.ready()


@pytest.fixture
def zmq_cluster(zmq_shared: SharedCluster) -> Server:
    """1P1D over link `zmq`, every prompt prefilled remotely, with an API key and vLLM's token-level routes.

    P announces layers of the last chunk; the cluster over `host` does not, as is the default.
    """
    return zmq_shared.ready()


@pytest.fixture(scope="session")
def golden(model_path: str, log_dir: Path, make_prompt: PromptMaker) -> Golden:
    """What a single vLLM server answers; the server is gone when this returns."""
    kept = os.environ.get(GOLDEN_FILE)
    if kept and Path(kept).exists():
        return msgspec.json.decode(Path(kept).read_bytes(), type=Golden)
    server = Server(single_vllm(model_path, free_port()), log_dir)
    try:
        server.wait_until_healthy()
        recorded = record(server, make_prompt)
    finally:
        server.stop()
    if kept:
        Path(kept).write_bytes(msgspec.json.encode(recorded))
    return recorded
