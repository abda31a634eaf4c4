"""What one worker needs of memory and what it has, from its plan, the model and the machine. Pure. Sizes in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from cluster.launch.worker_plan import WorkerPlan
from cluster.preflight.machine import Machine
from cluster.preflight.memory.rank_memory import RankMemory, blocks_for
from cluster.preflight.memory.weights import weights_at_least
from cluster.preflight.model_facts import ModelFacts, kv_element_bytes

GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default."""
CPU_BLOCK_SIZE = 128
GPU_BLOCK_SIZE = 16

# Options that move weights or KV elsewhere; with them the arithmetic here would refuse what runs.
_ELSEWHERE = (
    "cpu_offload_gb", "offload_backend", "offload_group_size", "offload_params", "kv_cache_dtype_skip_layers",
    "quantization_config", "config_format",
)  # fmt: skip
_RANKS_THAT_SHARE_KV = ("decode_context_parallel_size", "prefill_context_parallel_size")


@dataclass(frozen=True)
class WorkerMemory:
    """Of one worker. None: cannot be told, and is not checked."""

    tensor_parallel: int
    block_size: int
    weights_bytes: int | None
    """Of all ranks together, at least."""
    kv_bytes_per_token: int | None
    """Of one rank."""
    max_model_len: int | None
    """The longest request; None also where the engine fits it to the memory."""
    kv_given_bytes: int | None
    """Of one rank, where options say it; otherwise the engine takes what is left."""
    device_bytes: int | None
    """The smallest of its GPUs; None on CPUs."""
    share: float = GPU_MEMORY_UTILIZATION
    """Of each GPU."""
    gpus: tuple[str, ...] = ()

    @property
    def weights_of_rank(self) -> float:
        return (self.weights_bytes or 0) / self.tensor_parallel

    @property
    def num_blocks(self) -> int | None:
        """For one request of max_model_len."""
        return blocks_for(self.max_model_len, self.block_size) if self.max_model_len is not None else None

    @property
    def request_bytes(self) -> int | None:
        """On one rank, of one request of max_model_len."""
        if self.num_blocks is None or self.kv_bytes_per_token is None:
            return None
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    def rank(self, activation_bytes: float = 0.0) -> RankMemory | None:
        """One rank on its GPU."""
        if self.device_bytes is None or self.weights_bytes is None or self.kv_bytes_per_token is None:
            return None
        return RankMemory(
            self.device_bytes, self.share, self.weights_of_rank, self.kv_bytes_per_token, activation_bytes
        )

    @property
    def room_bytes(self) -> float | None:
        """For the KV of one rank, at most."""
        if self.kv_given_bytes is not None:
            return self.kv_given_bytes
        rank = self.rank()
        return rank.kv_bytes if rank is not None else None


def worker_memory(plan: WorkerPlan, machine: Machine, model: ModelFacts | None) -> WorkerMemory:
    """Everything that can be told about a worker that is to run on this machine."""
    engine = plan.engine
    ranks: int = engine["tensor_parallel_size"]
    block_size = engine.get("block_size") or (CPU_BLOCK_SIZE if machine.on_cpu else GPU_BLOCK_SIZE)
    gpus = _gpus(plan, machine)
    sizes = [machine.gpu_memory.get(gpu) for gpu in gpus]
    known = [size for size in sizes if size is not None]
    share = engine.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION)
    per_token = _kv_bytes_per_token(engine, ranks, model) if model is not None else None
    return WorkerMemory(
        tensor_parallel=ranks,
        block_size=block_size,
        weights_bytes=_weights_bytes(engine, machine, model) if model is not None else None,
        kv_bytes_per_token=per_token,
        max_model_len=longest_request(engine, model),
        kv_given_bytes=_kv_given_bytes(plan, machine, block_size, per_token),
        device_bytes=min(known) if known and len(known) == len(sizes) else None,
        share=share if isinstance(share, float | int) else GPU_MEMORY_UTILIZATION,
        gpus=gpus,
    )


def longest_request(engine: Mapping[str, Any], model: ModelFacts | None) -> int | None:
    """`max_model_len`, or the model's own length; None where the engine fits it to the memory, or nobody knows."""
    asked = engine.get("max_model_len")
    if asked is not None:
        return asked if is_count(asked) else None
    return model.max_positions if model is not None else None


def kv_option(plan: WorkerPlan, machine: Machine) -> int | None:
    """KV memory of each rank as options and environment give it."""
    space_gib = plan.env.get("VLLM_CPU_KVCACHE_SPACE") or machine.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if machine.on_cpu and space_gib.isdigit() and int(space_gib) > 0:
        return int(space_gib) << 30
    given = plan.engine.get("kv_cache_memory_bytes")
    return given if is_count(given) else None


def is_count(value: object) -> TypeGuard[int]:
    """Whether this is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _kv_given_bytes(plan: WorkerPlan, machine: Machine, block_size: int, per_token: int | None) -> int | None:
    blocks = plan.engine.get("num_gpu_blocks_override")
    if is_count(blocks):
        return blocks * block_size * per_token if per_token is not None else None
    return kv_option(plan, machine)


def _gpus(plan: WorkerPlan, machine: Machine) -> tuple[str, ...]:
    if machine.on_cpu:
        return ()
    named = [gpu.strip() for gpu in plan.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return tuple(named[: plan.engine["tensor_parallel_size"]])


def _kv_bytes_per_token(engine: Mapping[str, Any], ranks: int, model: ModelFacts) -> int | None:
    if any(engine.get(option, 1) not in (None, 1) for option in _RANKS_THAT_SHARE_KV) or _is_elsewhere(engine):
        return None
    kv_dtype = engine.get("kv_cache_dtype")
    of_checkpoint = model.quantizes_kv and kv_dtype in (None, "auto")
    element = 1 if of_checkpoint else kv_element_bytes(engine.get("dtype"), kv_dtype)
    return model.kv_bytes_per_token(ranks, element) if element is not None else None


def _weights_bytes(engine: Mapping[str, Any], machine: Machine, model: ModelFacts) -> int | None:
    if _is_elsewhere(engine):
        return None
    computed = weights_at_least(model.shape, model.weight_bytes, model.quantized_bytes, engine)
    if computed is None and machine.on_cpu and not engine.get("quantization"):
        return model.weight_bytes or None
    return computed


def _is_elsewhere(engine: Mapping[str, Any]) -> bool:
    return any(engine.get(option) for option in _ELSEWHERE)
