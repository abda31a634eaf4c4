from collections.abc import Sequence

from rich.console import Console

from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.preflight.model_facts import ModelFacts
from cluster.terminal.memory_table import memory_table
from tests.unit.cluster.memory.models_70b import h100s, llama_70b


def shown(overrides: Sequence[str], model: ModelFacts | None, machine: Machine) -> str:
    table = memory_table(WorkerPlanner(load_config(None, overrides), machine, model).first(), machine, model)
    if table is None:
        return ""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_row_per_pool_shows_the_arithmetic() -> None:
    overrides = ["pools.prefill.tensor_parallel=4", "pools.prefill.replicas=2", "pools.decode.tensor_parallel=8"]
    lines = shown(overrides, llama_70b(), h100s(16)).splitlines()
    (prefill,) = (line for line in lines if "prefill" in line)
    (decode,) = (line for line in lines if "decode" in line)
    for part in ("35.3 GB", "80 KiB", "40.4 GB = 493,", "131,072 tokens = 10.7 GB, 3.8 at once"):
        assert part in prefill
    for part in ("17.6 GB", "40 KiB", "58.0 GB", "10.8 at once"):
        assert part in decode


def test_without_gpus_the_room_is_what_was_given() -> None:
    machine = Machine(cores=(0, 1), memory_free_bytes=1 << 40)
    overrides = ["engine.kv_cache_memory_bytes=1073741824", "engine.max_model_len=1024"]
    assert "1.1 GB = 3,276 tokens" in shown(overrides, llama_70b(), machine)


def test_what_is_not_known_is_not_shown() -> None:
    assert shown([], None, h100s(2)) == ""
    unknown = h100s(2, 0)
    assert "unknown" in shown([], llama_70b(), Machine(cores=(0,), gpus=unknown.gpus))
