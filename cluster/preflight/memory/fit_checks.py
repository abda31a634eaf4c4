"""Refuses what cannot fit, with the arithmetic. What would run is never refused: every figure is a lower bound.

On GPUs a worker's ranks get `gpu_memory_utilization` of their device each, and what weights leave of it holds KV. On
CPUs all workers share the machine's memory, and KV has the size that options or the plan give it.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from cluster.config import ClusterConfig
from cluster.launch.worker_plan import WorkerPlan
from cluster.preflight.machine import Machine
from cluster.preflight.memory.rank_memory import EXPECTED_ACTIVATION_BYTES
from cluster.preflight.memory.sizes import gb, kib, mib
from cluster.preflight.memory.worker_memory import WorkerMemory, is_count, kv_option, worker_memory
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import Problem

logger = logging.getLogger("twinpool.preflight")

_KV_OPTIONS = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
_MOST_RANKS = 8
"""Of one worker that a remedy names: those of one machine."""


def fit_problems(
    config: ClusterConfig, plans: Sequence[WorkerPlan], machine: Machine, model: ModelFacts | None
) -> list[Problem]:
    """Of all workers, each alone and together."""
    workers = [(plan, worker_memory(plan, machine, model)) for plan in plans]
    problems = [problem for plan, worker in workers for problem in _given_kv_problems(config, plan, machine, worker)]
    if machine.on_cpu:
        return [*problems, *(() if machine.elsewhere else _machine_problems(workers, machine))]
    for plan, worker in workers:
        problems += _gpu_problems(config, plan, worker, model)
    return [*problems, *_shared_gpu_problems(workers)]


def path_of(config: ClusterConfig, plan: WorkerPlan, option: str) -> str:
    """Where the operator gave, or should give, an engine option of this worker."""
    in_pool = option in config.pools.of(plan.role).engine
    return f"pools.{plan.role}.engine.{option}" if in_pool else f"engine.{option}"


def _given_kv_problems(
    config: ClusterConfig, plan: WorkerPlan, machine: Machine, worker: WorkerMemory
) -> list[Problem]:
    """KV memory, or blocks, of a given size that cannot hold one request."""
    length, needed = worker.max_model_len, worker.num_blocks
    if length is None or needed is None or worker.request_bytes is None:
        return []
    blocks = plan.engine.get("num_gpu_blocks_override")
    if is_count(blocks):
        if blocks >= needed:
            return []
        return [
            Problem(
                path_of(config, plan, "num_gpu_blocks_override"),
                f"{blocks} blocks of {worker.block_size} tokens cannot hold one request of max_model_len={length}",
                f"Raise it to at least {needed}, or lower engine.max_model_len",
            )
        ]
    given = kv_option(plan, machine)
    if given is None or worker.request_bytes <= given:
        return []
    return [
        Problem(
            path_of(config, plan, "kv_cache_memory_bytes"),
            f"{mib(given)} of KV memory cannot hold one request of max_model_len={length}: {_request(worker)} = "
            f"{mib(worker.request_bytes)}",
            f"Raise it to at least {worker.request_bytes}{_or_shorter(worker, given)}",
        )
    ]


def _request(worker: WorkerMemory) -> str:
    return f"{worker.num_blocks} blocks x {worker.block_size} tokens x {worker.kv_bytes_per_token} bytes"


def _or_shorter(worker: WorkerMemory, room_bytes: float) -> str:
    fitting = _longest(worker, room_bytes)
    return f", or set engine.max_model_len to at most {fitting}" if fitting > 0 else ""


def _longest(worker: WorkerMemory, room_bytes: float) -> int:
    """Tokens of the longest request for which there is room."""
    per_block = worker.block_size * (worker.kv_bytes_per_token or 1)
    return int(room_bytes // per_block - 1) * worker.block_size


def _machine_problems(workers: Sequence[tuple[WorkerPlan, WorkerMemory]], machine: Machine) -> list[Problem]:
    """Whether weights and KV caches of all workers fit into this machine's memory."""
    weights = sum(worker.weights_bytes or 0 for _, worker in workers)
    kv = sum((worker.kv_given_bytes or 0) * worker.tensor_parallel for _, worker in workers)
    if weights + kv <= machine.memory_free_bytes:
        return []
    each = "; ".join(
        f"{plan.worker_id} {mib(worker.weights_bytes or 0)} + "
        f"{worker.tensor_parallel} x {mib(worker.kv_given_bytes or 0)}"
        for plan, worker in workers
    )
    field, remedy = "engine.kv_cache_memory_bytes", "Lower it, or lower pools.<role>.replicas, or free memory"
    if weights > machine.memory_free_bytes:
        field, remedy = "model", "Use a smaller one, or lower pools.<role>.replicas, or free memory"
    return [
        Problem(
            field,
            f"{len(workers)} workers need {mib(weights)} for weights and {mib(kv)} for KV caches, "
            f"{mib(machine.memory_free_bytes)} are free ({each})",
            remedy,
        )
    ]


def _gpu_problems(
    config: ClusterConfig, plan: WorkerPlan, worker: WorkerMemory, model: ModelFacts | None
) -> list[Problem]:
    """Whether the weights of one worker and one of its longest requests fit on its GPUs."""
    rank, device = worker.rank(), worker.device_bytes
    if rank is None or device is None:
        logger.info("%s: whether it fits on its GPUs is not checked, %s", plan.worker_id, _why_not(worker))
        return []
    path = f"pools.{plan.role}.tensor_parallel"
    per_gpu = (
        f"weights take at least {gb(rank.weights_bytes)} per GPU ({gb(worker.weights_bytes or 0)} / "
        f"{worker.tensor_parallel})"
    )
    if worker.kv_given_bytes is not None:
        total = rank.weights_bytes + worker.kv_given_bytes
        if total <= device:
            return []
        what = f"{per_gpu} and its KV cache {gb(worker.kv_given_bytes)}, together {gb(total)} of {gb(device)}"
        return [Problem(path, f"a {plan.role} worker does not fit: {what}", f"Raise it{_smaller_kv(config, plan)}")]
    needed = worker.request_bytes or 0
    if rank.kv_bytes > 0 and needed <= rank.kv_bytes:
        expected = replace(rank, activation_bytes=EXPECTED_ACTIVATION_BYTES)
        if needed > expected.kv_bytes:
            logger.warning(
                "%s: %s of KV memory hold one request of max_model_len (%s) only if activations, CUDA graphs and NCCL "
                "take less than %s; %s are usual",
                plan.worker_id, gb(rank.kv_bytes), gb(needed), gb(rank.kv_bytes - needed),
                gb(EXPECTED_ACTIVATION_BYTES),
            )  # fmt: skip
        return []
    budget = f"gpu_memory_utilization={worker.share:g} of {gb(device)} is {gb(rank.usable_bytes)}, {per_gpu}"
    if rank.kv_bytes <= 0:
        what = f"a {plan.role} worker does not fit: {budget}, which leaves nothing for KV"
    else:
        what = (
            f"a {plan.role} worker cannot hold one request of max_model_len={worker.max_model_len}: {budget}, which "
            f"leaves {gb(rank.kv_bytes)} for KV; the request takes {gb(needed)} ({worker.num_blocks} blocks x "
            f"{worker.block_size} tokens x {kib(rank.kv_bytes_per_token)})"
        )
    return [Problem(path, what, _remedy(plan, worker, model))]


def _why_not(worker: WorkerMemory) -> str:
    if worker.weights_bytes is None:
        return "because the size of its weights cannot be computed for this model and these options"
    if worker.kv_bytes_per_token is None:
        return "because the size of its KV cannot be computed for this model and these options"
    return f"because the memory of GPU {', '.join(worker.gpus) or '(none named)'} is not known"


def _has_given_kv(plan: WorkerPlan) -> bool:
    return any(plan.engine.get(option) for option in _KV_OPTIONS)


def _smaller_kv(config: ClusterConfig, plan: WorkerPlan) -> str:
    for option in _KV_OPTIONS:
        if option in plan.engine:
            return f", or lower {path_of(config, plan, option)}"
    return ""


def _remedy(plan: WorkerPlan, worker: WorkerMemory, model: ModelFacts | None) -> str:
    """What would make it fit, each alone."""
    ways = []
    if (ranks := _enough_ranks(plan, worker, model)) is not None:
        ways.append(f"raise it to {ranks}")
    rank = worker.rank()
    if rank is not None and (fitting := _longest(worker, rank.kv_bytes)) > 0:
        ways.append(f"set engine.max_model_len to at most {fitting}")
    if model is not None and plan.engine.get("kv_cache_dtype") in (None, "auto"):
        halved = replace(worker, kv_bytes_per_token=model.kv_bytes_per_token(worker.tensor_parallel, 1))
        if _fits(halved):
            ways.append("set engine.kv_cache_dtype=fp8")
    if _fits(replace(worker, weights_bytes=(worker.weights_bytes or 0) // 2)):
        ways.append("use a checkpoint with half as many bytes per weight (fp8 for bf16)")
    text = ", or ".join(ways) or "use larger GPUs or a smaller model"
    return text[:1].upper() + text[1:]


def _enough_ranks(plan: WorkerPlan, worker: WorkerMemory, model: ModelFacts | None) -> int | None:
    """The smallest number of ranks that fits and shares the heads evenly; None if none of one machine's does."""
    if model is None or model.num_heads is None or model.num_kv_heads is None or worker.kv_bytes_per_token is None:
        return None
    element = worker.kv_bytes_per_token // (model.kv_bytes_per_token(worker.tensor_parallel, 1) or 1)
    for ranks in range(worker.tensor_parallel + 1, _MOST_RANKS + 1):
        if model.heads_divide(ranks):
            per_token = model.kv_bytes_per_token(ranks, element)
            if _fits(replace(worker, tensor_parallel=ranks, kv_bytes_per_token=per_token)):
                return ranks
    return None


def _fits(worker: WorkerMemory) -> bool:
    """As is to be expected, which is less than what is possible."""
    rank = worker.rank(EXPECTED_ACTIVATION_BYTES)
    return rank is not None and rank.kv_bytes > 0 and (worker.request_bytes or 0) <= rank.kv_bytes


def _shared_gpu_problems(workers: Sequence[tuple[WorkerPlan, WorkerMemory]]) -> list[Problem]:
    """GPUs that several workers were given: what they take together."""
    users: dict[str, list[tuple[WorkerPlan, WorkerMemory]]] = {}
    for plan, worker in workers:
        for gpu in worker.gpus:
            users.setdefault(gpu, []).append((plan, worker))
    problems = []
    for gpu, sharing in users.items():
        shares = [worker.share for plan, worker in sharing if not _has_given_kv(plan)]
        names = ", ".join(plan.worker_id for plan, _ in sharing)
        if len(sharing) > 1 and len(shares) == len(sharing) and sum(shares) > 1 + 1e-6:
            problems.append(
                Problem(
                    "engine.gpu_memory_utilization",
                    f"{names} share GPU {gpu} and would take {' + '.join(f'{share:g}' for share in shares)} of it",
                    f"Set it to at most {int(100 / len(sharing)) / 100:g}, or give them GPUs of their own",
                )
            )
            continue
        device = sharing[0][1].device_bytes
        kv = sum(worker.kv_given_bytes or worker.request_bytes or 0 for _, worker in sharing)
        least = sum(worker.weights_of_rank for _, worker in sharing) + kv
        if len(sharing) > 1 and device is not None and least > device:
            problems.append(
                Problem(
                    "pools",
                    f"{names} share GPU {gpu} and need at least {gb(least)} of its {gb(device)} for weights and KV",
                    "Give them GPUs of their own, or lower engine.max_model_len or their KV memory",
                )
            )
    return problems
