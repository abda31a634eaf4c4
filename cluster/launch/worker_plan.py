"""Decides, without touching anything, which workers run with which cores, memory, devices and engine options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config import ROLES, ClusterConfig, PoolConfig, Role
from cluster.launch.seats import BIND, DEVICES, Seats
from cluster.preflight.machine import Machine
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import ConfigError, Problem
from cluster.vllm_idle_wait import VARIABLE as ENGINE_WAITS

_GIB = 1 << 30
_KV_STEP_BYTES = 256 << 20
_KV_SMALL_MACHINE_BYTES = 2 * _GIB
_KV_LARGE_MACHINE_BYTES = 8 * _GIB
_LARGE_MACHINE_BYTES = 64 * _GIB
# Python, torch and compiled kernels of a host, an engine core and a rank, measured at about 1.1 GiB on CPUs.
_WORKER_OVERHEAD_BYTES = 1_250 << 20
# An API server besides the first one: 740 MiB were measured with a tokenizer of 49,152 tokens.
_API_SERVER_BYTES = 800 << 20

CPU_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class WorkerPlan:
    """One worker to start."""

    worker_id: str
    role: Role
    engine: Mapping[str, Any]
    """Keyword arguments for AsyncEngineArgs, without model and connector."""
    env: Mapping[str, str]
    """Variables to set on top of the machine's environment."""
    cores: tuple[tuple[int, ...], ...]
    """Per rank, the logical CPUs its compute threads are bound to; empty where vLLM or the operator decides."""
    niceness: int = 0
    """How far its processes step back for others."""
    simulated: bool = False
    """There is no engine, see `cluster.simulated`."""
    across_nodes: bool = False
    """Its ranks may be on several nodes of a Ray cluster."""


class WorkerPlanner:
    """Plans the workers of a configuration on one machine: those it starts with, and those that come later."""

    def __init__(self, config: ClusterConfig, machine: Machine, model: ModelFacts | None = None) -> None:
        self._config, self._machine, self._model = config, machine, model
        num_workers = sum(_most(config, role) for role in ROLES)
        num_ranks = sum(_most(config, role) * config.pools.of(role).tensor_parallel for role in ROLES)
        others_bytes = (config.server.api_servers - 1) * _API_SERVER_BYTES
        self._kv_bytes = _default_kv_bytes(machine, num_ranks, num_workers, model, others_bytes)
        self._seats = Seats(machine, _split_cores(machine, num_ranks) if machine.on_cpu else [])

    def first(self) -> list[WorkerPlan]:
        """The workers that the cluster starts with, prefill first; raises `ConfigError` when they do not fit."""
        num_gpus, wanted = len(self._machine.gpus), _num_gpus_wanted(self._config)
        if num_gpus and wanted > num_gpus and not self._machine.elsewhere:
            raise ConfigError(
                [
                    Problem(
                        "pools",
                        f"both pools together need {wanted} GPUs, this machine shows {num_gpus}",
                        "Lower replicas or tensor_parallel, or let workers share: set "
                        "pools.<role>.env.CUDA_VISIBLE_DEVICES and pools.<role>.engine.gpu_memory_utilization",
                    )
                ]
            )
        return [self.next(role) for role in ROLES for _ in range(self._config.pools.of(role).replicas)]

    def next(self, role: Role) -> WorkerPlan:
        """One more worker of a pool, with an id that none has had; raises `NothingFree`."""
        pool = self._config.pools.of(role)
        seat = self._seats.take(role, pool)
        unbound = _unbound(self._config) if self._machine.elsewhere and self._machine.on_cpu else {}
        return WorkerPlan(
            worker_id=seat.worker_id,
            role=role,
            engine=_engine_options(self._config, pool, self._machine, self._kv_bytes),
            env={**_defaults_for_environment(self._model, self._machine), **seat.env, **unbound, **pool.env},
            cores=seat.cores,
            niceness=pool.niceness if self._machine.on_cpu else 0,
            across_nodes=pool.across_nodes and pool.tensor_parallel > 1,
        )

    @property
    def devices(self) -> int | None:
        """GPUs, or shares of the cores, of all workers there may be; None where the operator deals them."""
        return self._seats.count_for([self._config.pools.of(role) for role in ROLES])

    def left(self, worker_id: str) -> None:
        """Nothing is left of a worker; what it computed on may be dealt again."""
        self._seats.give_back(worker_id)


def _most(config: ClusterConfig, role: Role) -> int:
    """Workers of a pool for which a machine's cores and memory are divided."""
    bounds = config.autoscale.prefill if role == "prefill" else config.autoscale.decode
    return max(config.pools.of(role).replicas, bounds.max or 0)


def _engine_options(config: ClusterConfig, pool: PoolConfig, machine: Machine, kv_bytes: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    if machine.on_cpu:
        # Chunks short enough that a step on one core stays near half a second.
        defaults["max_num_batched_tokens"] = CPU_CHUNK_TOKENS
        # Compiling takes over a minute per start on one core, cached or not; it makes decode steps a fifth shorter.
        defaults["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in pool.env and not machine.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            defaults["kv_cache_memory_bytes"] = kv_bytes
    return {**defaults, **config.engine, **pool.engine, "tensor_parallel_size": pool.tensor_parallel}


def _unbound(config: ClusterConfig) -> dict[str, str]:
    """Under Ray a claim is a number of CPUs, and says nothing about which."""
    return {BIND: "nobind", "OMP_NUM_THREADS": str(max(1, int(config.ray.cpus_per_rank)))}


def _split_cores(machine: Machine, num_ranks: int) -> list[tuple[int, ...]]:
    """Cores per rank. Whole cores when there are enough, hardware threads when not, shared when those are too few."""
    cores = machine.cores
    if len(cores) < num_ranks:
        cores = tuple(sorted((*machine.cores, *machine.siblings)))
    if len(cores) < num_ranks:
        return [(cores[rank % len(cores)],) for rank in range(num_ranks)]
    # With cores to spare, one stays free for the proxy, the hosts and the engine cores.
    spare = 1 if len(cores) >= 4 * num_ranks and not machine.siblings else 0
    share = (len(cores) - spare) // num_ranks
    return [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]


def _default_kv_bytes(
    machine: Machine, num_ranks: int, num_workers: int, model: ModelFacts | None, others_bytes: int
) -> int:
    """KV memory per rank: half of what weights and processes leave free, within bounds, in steps of 256 MiB."""
    weights = model.weight_bytes if model is not None else 0
    left = machine.memory_free_bytes - others_bytes - num_workers * (weights + _WORKER_OVERHEAD_BYTES)
    share = max(0, left) // 2 // max(1, num_ranks)
    cap = _KV_LARGE_MACHINE_BYTES if machine.memory_free_bytes >= _LARGE_MACHINE_BYTES else _KV_SMALL_MACHINE_BYTES
    return max(_KV_STEP_BYTES, min(cap, share) // _KV_STEP_BYTES * _KV_STEP_BYTES)


def _defaults_for_environment(model: ModelFacts | None, machine: Machine) -> dict[str, str]:
    """No look-ups on model hubs for a model that is on disk, no usage reports, no spinning where others compute.

    The operator's own values win.
    """
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if machine.on_cpu:
        wanted[ENGINE_WAITS] = "asleep"
    if model is not None:
        wanted["HF_HUB_OFFLINE"] = "1"
    return {name: value for name, value in wanted.items() if name not in machine.environ}


def _num_gpus_wanted(config: ClusterConfig) -> int:
    pools = [config.pools.of(role) for role in ROLES]
    return sum(pool.replicas * pool.tensor_parallel for pool in pools if DEVICES not in pool.env)
