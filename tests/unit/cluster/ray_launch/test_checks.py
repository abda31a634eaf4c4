import importlib.util

import pytest

from cluster.config import ClusterConfig
from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine, nodes_of_a_cluster
from cluster.preflight.problems import ConfigError
from cluster.ray_launch.checks import ray_problems
from cluster.ray_launch.config import RayConfig


def configured(*overrides: str) -> ClusterConfig:
    return load_config(None, ["launch=ray", *overrides])


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (problem,) = ray_problems(configured())
    assert "pip install 'twinpool[ray]'" in problem.remedy


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("transfer.bind_host=10.0.0.1", "transfer.bind_host"),
        ("engine.distributed_executor_backend=ray", "engine.distributed_executor_backend"),
        ("pools.decode.env.CUDA_VISIBLE_DEVICES=0", "pools.decode.env.CUDA_VISIBLE_DEVICES"),
        ("ray.resources.decode.GPU=1", "ray.resources.decode.GPU"),
    ],
)
def test_what_ray_decides_is_not_given_by_hand(override: str, field: str) -> None:
    assert ray_problems(configured()) == []
    assert [problem.field for problem in ray_problems(configured(override))] == [field]


@pytest.mark.usefixtures("with_ray")
def test_simulated_workers_have_processes_of_their_own() -> None:
    (problem,) = ray_problems(configured("engine=simulated"))
    assert problem.field == "simulation.workers_per_process"
    assert ray_problems(configured("engine=simulated", "simulation.workers_per_process=1")) == []


@pytest.mark.usefixtures("with_ray")
def test_ranks_on_several_nodes_need_several_nodes_and_engines() -> None:
    assert ray_problems(configured("pools.decode.across_nodes=true")) == []
    with pytest.raises(ConfigError, match=r"there is one node\. Set launch=ray"):
        load_config(None, ["pools.decode.across_nodes=true"])
    with pytest.raises(ConfigError, match="these are simulated"):
        configured("engine=simulated", "pools.prefill.across_nodes=true")


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", "here:"])
def test_an_address_must_be_of_a_cluster_that_this_machine_is_in(address: str) -> None:
    with pytest.raises(ConfigError, match=r"ray\.address"):
        configured(f"ray.address={address}")


def test_ray_without_launch_is_refused() -> None:
    with pytest.raises(ConfigError, match="launch=ray"):
        load_config(None, ["ray.address=10.0.0.1:6379"])


def test_workers_elsewhere_get_neither_cores_nor_devices_of_this_machine() -> None:
    here = Machine(cores=(0, 1), gpus=("0", "1"), environ={"VLLM_NO_USAGE_STATS": "0"})
    plans = WorkerPlanner(
        configured("pools.decode.tensor_parallel=16", "ray.cpus_per_rank=4"), nodes_of_a_cluster(here)
    ).first()
    for plan in plans:
        assert plan.cores == ()
        assert "CUDA_VISIBLE_DEVICES" not in plan.env
        assert plan.env["VLLM_NO_USAGE_STATS"] == "1", "the environment of the node counts, which nobody knows here"
        if "VLLM_CPU_OMP_THREADS_BIND" in plan.env:
            assert (plan.env["VLLM_CPU_OMP_THREADS_BIND"], plan.env["OMP_NUM_THREADS"]) == ("nobind", "4")


def test_only_a_worker_of_several_ranks_can_be_on_several_nodes() -> None:
    both = ("pools.prefill.across_nodes=true", "pools.decode.across_nodes=true", "pools.decode.tensor_parallel=2")
    here = nodes_of_a_cluster(Machine(cores=(0, 1), gpus=(), environ={}))
    plans = WorkerPlanner(configured(*both), here).first()
    assert {plan.role: plan.across_nodes for plan in plans} == {"prefill": False, "decode": True}


def test_every_field_has_a_description() -> None:
    assert all(field.description for field in RayConfig.model_fields.values())
