"""vLLM's Ray executor, for a worker whose ranks may be on several nodes.

The engine core joins Ray as a driver of its own and starts a rank in each part of the worker's placement group. It
hands out work as on one machine, but over tcp to ranks on other nodes. However it ends, Ray ends its actors, the ranks;
when a rank ends, `RayExecutorV2` notices and the engine ends.

What is ours: the placement group, which another driver made; where a rank listens, which is its own node's address; the
cluster's key, which a rank elsewhere cannot read from the host's file; and nodes without GPUs, which vLLM 0.32 refuses
under Ray (`ray_device_key` of its CPU platform is empty) although nothing else stands in the way.

Internals of vLLM 0.32 this relies on, in `vllm.v1.executor.ray_executor_v2`: the globals `RayWorkerProc` and
`initialize_ray_cluster`, looked up by `RayExecutorV2._init_executor`; `RayExecutorV2._get_actor_resource_kwargs`;
`RayWorkerProc.__init__(vllm_config=...)`, `.get_node_and_physical_gpu_ids`, `.initialize_worker`; the configuration is
pickled while ranks are started, and logged only before; `current_platform.ray_device_key`;
`CPUWorker.init_device` names shared memory by what follows the last colon of the rendezvous' address, and
`CpuCommunicator` uses it only if all ranks have one name.
Of Ray: what `cluster/ray_launch/ray_actor.py` says of placement groups; `ray.init` takes over SIGTERM;
`JobConfig(_py_driver_sys_path=...)` is where its processes look for modules.
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup
from vllm.config import ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

import cluster
from kvtransfer.trust.key import key_in_memory, read_key

RAY_ADDRESS, GROUP_ID = "ray_address", "placement_group"
"""HOST:PORT of the head, and hexadecimal digits: among the connector's settings, which reach the engine core."""


class AcrossNodesExecutor(RayExecutorV2):  # type: ignore[misc]
    """Ranks are actors in the placement group that the connector's settings name."""

    def _init_executor(self) -> None:
        settings = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        with _ours_in_the_place_of_vllms(settings), _with_the_key(settings):
            super()._init_executor()

    def _get_actor_resource_kwargs(self) -> dict[str, Any]:
        if current_platform.is_cpu():
            return {}  # vLLM gives its actors no CPUs, and the part of the group is the rank's alone
        claimed: dict[str, Any] = super()._get_actor_resource_kwargs()
        return claimed


class AcrossNodesRank(RayWorkerProc):  # type: ignore[misc]
    """A rank, in the process of its actor, on whatever node that is."""

    def __init__(self, vllm_config: VllmConfig, **others: Any) -> None:
        settle(vllm_config.kv_transfer_config.kv_connector_extra_config, ray.util.get_node_ip_address())
        super().__init__(vllm_config=vllm_config, **others)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        if current_platform.is_cpu():
            return ray.get_runtime_context().get_node_id(), []
        found: tuple[str, list[int]] = super().get_node_and_physical_gpu_ids()
        return found

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        if current_platform.is_cpu():
            # Ranks on different machines would take each other's shared memory for their own.
            distributed_init_method = f"{distributed_init_method}?node={ray.get_runtime_context().get_node_id()}"
            assigned_physical_gpu_ids = None
            # Ray gave one to an actor that claims none.
            torch.set_num_threads(int((driver_env_vars or {}).get("OMP_NUM_THREADS", 1)))
        super().initialize_worker(
            local_rank, env_vars, distributed_init_method, driver_env_vars, assigned_physical_gpu_ids
        )


def settle(settings: dict[str, Any], node_ip: str) -> None:
    """Makes the connector's settings, which are the host's, those of a rank on this node."""
    settings["bind"] = f"tcp://{node_ip}:0"
    if settings.get("key_file"):
        settings["key_file"] = str(key_in_memory(settings["key_file"]))


@contextmanager
def _with_the_key(settings: dict[str, Any]) -> Iterator[None]:
    """Ranks are started with the key itself, whose `repr` hides it, in the place of a path on this node."""
    path = settings.get("key_file", "")
    if path:
        settings["key_file"] = read_key(Path(path))
    try:
        yield
    finally:
        settings["key_file"] = path


@contextmanager
def _ours_in_the_place_of_vllms(settings: Mapping[str, Any]) -> Iterator[None]:
    """While vLLM starts the ranks: our class of them, and our placement group."""
    join_vllms = ray_executor_v2.initialize_ray_cluster

    def join(parallel_config: ParallelConfig, require_gpu_on_driver: bool = False) -> None:
        _join_ray(settings[RAY_ADDRESS])
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(settings[GROUP_ID])))
        parallel_config.placement_group = group
        if current_platform.is_cpu():
            current_platform.ray_device_key = next(iter(group.bundle_specs[0]))  # by which it counts a group's parts
        else:
            join_vllms(parallel_config, require_gpu_on_driver=require_gpu_on_driver)

    key = current_platform.ray_device_key
    ray_executor_v2.RayWorkerProc, ray_executor_v2.initialize_ray_cluster = AcrossNodesRank, join
    try:
        yield
    finally:
        ray_executor_v2.RayWorkerProc, ray_executor_v2.initialize_ray_cluster = RayWorkerProc, join_vllms
        current_platform.ray_device_key = key


def _join_ray(address: str) -> None:
    """As a driver of its own; what ranks print goes to this worker's log."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = str(Path(cluster.__file__).parents[1])  # where this tree is not installed but in PYTHONPATH
    ray.init(address=address, configure_logging=False, job_config=JobConfig(_py_driver_sys_path=[root]))
    for number, handler in handlers.items():
        signal.signal(number, handler)
