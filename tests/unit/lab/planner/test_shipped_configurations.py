"""The configurations in `examples/` are read as `twinpool serve` reads them and fit by the planner's arithmetic."""

import functools
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, PoolConfig
from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight import config_checks
from cluster.preflight.config_checks import check_config
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.preflight.memory.rank_memory import blocks_for
from cluster.preflight.memory.worker_memory import GPU_BLOCK_SIZE, worker_memory
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import ConfigError
from cluster.preflight.vllm_options import installed_vllm_options
from cluster.ray_launch.placing import Ask, Node, choose_nodes
from lab.planner.gpus import GPUS
from lab.planner.models import MODELS
from lab.planner.steps import EXPECTED, Steps
from tests.unit.cluster.memory.models_70b import FP8, h100s, llama_70b

EXAMPLES = Path(__file__).parents[4] / "examples"
NAMES = [
    "llama-70b-8xh100", "llama-70b-8xh100-fp8", "llama-70b-8xh100-128k", "llama-70b-16xh100", "llama-70b-16xh100-128k",
]  # fmt: skip
_OPTIONS = functools.cache(installed_vllm_options)
LLAMA_70B, H100 = MODELS["llama-3.1-70b"], GPUS["h100"]


@pytest.fixture(autouse=True)
def options_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "installed_vllm_options", _OPTIONS)


def read(name: str, *overrides: str) -> ClusterConfig:
    """As if all GPUs were in one machine: what a Ray cluster has is not known before its workers start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return load_config(
            EXAMPLES / f"{name}.yaml", [f"server.port={probe.getsockname()[1]}", "launch=local", *overrides]
        )


def model_of(name: str) -> ModelFacts:
    return llama_70b(**FP8) if "fp8" in name else llama_70b()


def gpus_of(name: str) -> int:
    return int(name.split("-")[2].removesuffix("xh100"))


def planned(config: ClusterConfig, pool: PoolConfig, name: str) -> Steps:
    """What the planner says of one worker."""
    return Steps(
        LLAMA_70B, H100, pool.tensor_parallel, 1 if "fp8" in name else 2,
        1 if config.engine.get("kv_cache_dtype") == "fp8" else 2, EXPECTED, config.engine["gpu_memory_utilization"],
    )  # fmt: skip


def whole_contexts(config: ClusterConfig, pool: PoolConfig, name: str) -> float:
    tokens = blocks_for(config.engine["max_model_len"], GPU_BLOCK_SIZE) * GPU_BLOCK_SIZE
    return planned(config, pool, name).kv_tokens / tokens


def test_every_shipped_file_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_can_be_started_on_its_gpus_and_on_no_fewer(name: str) -> None:
    config = read(name)
    assert check_config(config, h100s(gpus_of(name)), model_of(name))
    with pytest.raises(ConfigError, match="GPUs"):
        check_config(config, h100s(gpus_of(name) - 1), model_of(name))


@pytest.mark.parametrize("name", ["llama-70b-16xh100", "llama-70b-16xh100-128k"])
def test_sixteen_gpus_are_two_nodes_of_a_ray_cluster_and_every_worker_gets_one(name: str) -> None:
    config = read(name, "launch=ray")
    assert load_config(EXAMPLES / f"{name}.yaml").launch == "ray"
    asks = []
    for plan in WorkerPlanner(config, Machine(cores=(0,), gpus=("any",), elsewhere=True), model_of(name)).first():
        ranks = plan.engine["tensor_parallel_size"]
        asks.append(Ask(plan.worker_id, plan.role, {"GPU": float(ranks), "CPU": float(ranks)}))
    free = {"GPU": 8.0, "CPU": 64.0}
    nodes = [Node(node_id, f"10.0.0.{number}", free, free) for number, node_id in enumerate("ab")]
    chosen = choose_nodes(asks, nodes)
    assert chosen["prefill-0"] == chosen["prefill-1"] != chosen["decode-0"]


@pytest.mark.parametrize("name", NAMES)
def test_the_planner_finds_room_for_a_whole_context_on_every_worker(name: str) -> None:
    config = read(name)
    for pool in (config.pools.prefill, config.pools.decode):
        assert whole_contexts(config, pool, name) >= 1
    if name.endswith("128k"):
        assert config.engine["max_model_len"] == LLAMA_70B.context


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_examples_says_what_the_planner_says(name: str) -> None:
    config = read(name)
    (row,) = re.findall(rf"`{name}\.yaml` .*\| ([\d.]+) \|", (EXAMPLES / "README.md").read_text())
    assert float(row) == pytest.approx(whole_contexts(config, config.pools.decode, name), abs=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_at_start_and_what_the_planner_refuses_agree(name: str) -> None:
    config = read(name)
    machine = h100s(gpus_of(name), int(H100.memory_bytes))
    for plan in WorkerPlanner(config, machine, model_of(name)).first():
        worker = worker_memory(plan, machine, model_of(name))
        steps = planned(config, config.pools.of(plan.role), name)
        assert worker.kv_bytes_per_token == steps.kv_bytes_per_token
        rank = worker.rank(steps.activation_bytes)
        assert rank is not None
        assert rank.kv_tokens == steps.kv_tokens


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama-70b-8xh100", ["pools.decode.tensor_parallel=1"]),
        ("llama-70b-8xh100-fp8", ["pools.prefill.tensor_parallel=1"]),
        ("llama-70b-8xh100-128k", ["pools.prefill.tensor_parallel=2", "engine.kv_cache_dtype=auto"]),
        ("llama-70b-16xh100", ["pools.prefill.tensor_parallel=1"]),
        ("llama-70b-16xh100-128k", ["pools.prefill.tensor_parallel=2"]),
    ],
)
def test_a_variant_that_is_too_large_is_refused_by_both(name: str, overrides: list[str]) -> None:
    config = read(name, *overrides)
    role = "decode" if "decode" in overrides[0] else "prefill"
    assert whole_contexts(config, config.pools.of(role), name) < 1
    with pytest.raises(ConfigError, match=rf"pools\.{role}\.tensor_parallel: a {role} worker .* (fit|hold)"):
        check_config(config, h100s(gpus_of(name)), model_of(name))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama-70b-8xh100-fp8", ["pools.prefill.replicas=3", "pools.decode.tensor_parallel=2"]),
        ("llama-70b-16xh100", ["pools.prefill.replicas=3", "pools.decode.tensor_parallel=4"]),
    ],
)
def test_the_variants_that_the_files_mention_fit(name: str, overrides: list[str]) -> None:
    config = read(name, *overrides)
    assert check_config(config, h100s(gpus_of(name)), model_of(name))
    assert min(whole_contexts(config, pool, name) for pool in (config.pools.prefill, config.pools.decode)) >= 1


def test_a_long_prompt_is_computed_within_its_class() -> None:
    for name in ("llama-70b-8xh100-128k", "llama-70b-16xh100-128k"):
        config = read(name)
        steps = replace(planned(config, config.pools.prefill, name), efficiency=EXPECTED)
        chunk = config.pools.prefill.engine["max_num_batched_tokens"]
        limit_s = config.slo.classes["document"].ttft_s
        assert limit_s is not None
        assert 2 * steps.prefill_s(LLAMA_70B.context, chunk) < limit_s  # another one may be before it
        assert steps.step_s(0, 0, chunk, LLAMA_70B.context - chunk) < config.liveness.stalled_after_s
