"""The arithmetic of `twinpool config check`: what a rank of each pool needs of memory, and what is left."""

from collections.abc import Sequence

from rich.table import Table

from cluster.launch.worker_plan import WorkerPlan
from cluster.preflight.machine import Machine
from cluster.preflight.memory.rank_memory import EXPECTED_ACTIVATION_BYTES
from cluster.preflight.memory.sizes import gb, kib
from cluster.preflight.memory.worker_memory import WorkerMemory, worker_memory
from cluster.preflight.model_facts import ModelFacts

_UNKNOWN = "unknown"


def memory_table(plans: Sequence[WorkerPlan], machine: Machine, model: ModelFacts | None) -> Table | None:
    """A row per pool, since its workers are alike. None if nothing can be told."""
    pools = {plan.role: worker_memory(plan, machine, model) for plan in plans if not plan.simulated}
    if all(worker.kv_bytes_per_token is None for worker in pools.values()):
        return None
    table = Table("per rank", "TP", "weights", "KV of a token", "room for KV", "one request of max_model_len")
    for role, worker in pools.items():
        weights = gb(worker.weights_of_rank) if worker.weights_bytes is not None else _UNKNOWN
        per_token = kib(worker.kv_bytes_per_token) if worker.kv_bytes_per_token is not None else _UNKNOWN
        table.add_row(role, str(worker.tensor_parallel), weights, per_token, _room(worker), _request(worker))
    return table


def _room_bytes(worker: WorkerMemory) -> float | None:
    """As is to be expected."""
    rank = worker.rank(EXPECTED_ACTIVATION_BYTES)
    if worker.kv_given_bytes is not None or rank is None:
        return worker.kv_given_bytes
    return rank.kv_bytes


def _room(worker: WorkerMemory) -> str:
    room = _room_bytes(worker)
    if room is None or worker.kv_bytes_per_token is None:
        return _UNKNOWN
    return f"{gb(room)} = {int(room / worker.kv_bytes_per_token):,} tokens"


def _request(worker: WorkerMemory) -> str:
    room, needed = _room_bytes(worker), worker.request_bytes
    if needed is None:
        return _UNKNOWN
    share = f", {room / needed:.1f} at once" if room is not None else ""
    return f"{worker.max_model_len:,} tokens = {gb(needed)}{share}"
