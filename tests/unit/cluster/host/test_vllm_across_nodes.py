"""What of vLLM and Ray is under workers whose ranks are on several nodes, and what their ranks are told."""

import copy
import inspect
from pathlib import Path

import pytest
from ray.util.placement_group import PlacementGroup
from vllm.config import ParallelConfig
from vllm.platforms import cpu, current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.worker.cpu_worker import CPUWorker

from cluster.host import vllm_across_nodes as ours
from cluster.host.vllm_across_nodes import AcrossNodesExecutor, AcrossNodesRank
from kvtransfer.trust.key import new_key, read_key, write_key


def test_vllm_starts_ranks_by_the_names_that_are_replaced() -> None:
    source = inspect.getsource(RayExecutorV2._init_executor)
    steps = (
        "initialize_ray_cluster(self.parallel_config, require_gpu_on_driver=False)",
        "self.parallel_config.placement_group",
        "get_bundles_sorted_by_node(placement_group)",
        "self._get_actor_resource_kwargs()",
        "ray.remote(RayWorkerProc)",
        "vllm_config=self.vllm_config",
        "get_node_and_physical_gpu_ids.remote()",
        "initialize_worker.remote(",
        "start_worker_monitor()",
    )
    assert sorted(steps, key=source.index) == list(steps)


def test_a_rank_of_ours_is_started_as_vllms() -> None:
    assert list(inspect.signature(AcrossNodesRank.initialize_worker).parameters) == list(
        inspect.signature(RayWorkerProc.initialize_worker).parameters
    )
    assert "vllm_config" in inspect.signature(RayWorkerProc.__init__).parameters
    assert ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=AcrossNodesExecutor).use_ray
    assert AcrossNodesExecutor.supports_async_scheduling()


def test_only_its_device_key_keeps_vllms_cpu_platform_from_ray() -> None:
    assert cpu.CpuPlatform.ray_device_key == ""
    assert 'init_method.split(":")[-1]' in inspect.getsource(CPUWorker.init_device)


def test_a_rank_listens_on_its_own_node_and_has_the_key_of_the_cluster(tmp_path: Path) -> None:
    key = new_key()
    on_the_host = {"bind": "tcp://10.0.0.1:0", "key_file": str(write_key(tmp_path / "k", key)), "beat_s": 5}
    settings = dict(on_the_host)
    with ours._with_the_key(settings):
        assert key.secret not in str(settings)
        arrived = copy.deepcopy(settings)  # Ray makes a copy, too
    assert settings == on_the_host
    ours.settle(arrived, "10.0.0.2")
    assert (arrived["bind"], arrived["beat_s"]) == ("tcp://10.0.0.2:0", 5)
    assert read_key(Path(arrived["key_file"])) == key


def test_vllm_has_its_own_back_when_the_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_join_ray", lambda _address: None)
    monkeypatch.setattr(PlacementGroup, "bundle_specs", [{"CPU": 1.0}] * 2)
    join = ray_executor_v2.initialize_ray_cluster
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=AcrossNodesExecutor)
    group_id = "0" * 36
    with ours._ours_in_the_place_of_vllms({ours.RAY_ADDRESS: "10.0.0.1:6379", ours.GROUP_ID: group_id}):
        assert ray_executor_v2.RayWorkerProc is AcrossNodesRank
        if current_platform.is_cpu():
            ray_executor_v2.initialize_ray_cluster(parallel, require_gpu_on_driver=False)
            assert parallel.placement_group.id.hex() == group_id
            assert current_platform.ray_device_key == "CPU"
    assert ray_executor_v2.RayWorkerProc is RayWorkerProc
    assert ray_executor_v2.initialize_ray_cluster is join
    assert current_platform.ray_device_key == cpu.CpuPlatform.ray_device_key or not current_platform.is_cpu()
