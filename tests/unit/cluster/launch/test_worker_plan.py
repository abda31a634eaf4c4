from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig
from cluster.launch.worker_plan import WorkerPlan, WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import ConfigError

GIB = 1 << 30
TWO_CORES = Machine(cores=(0, 1), memory_free_bytes=16 * GIB)
BIND = "VLLM_CPU_OMP_THREADS_BIND"
MODEL = ModelFacts(30, 9, 3, 64, 8192, 269_000_000)


def planned(machine: Machine, *overrides: str) -> dict[str, WorkerPlan]:
    return {plan.worker_id: plan for plan in WorkerPlanner(load_config(None, overrides), machine, MODEL).first()}


def binds(machine: Machine, *overrides: str) -> dict[str, str]:
    return {worker_id: plan.env[BIND] for worker_id, plan in planned(machine, *overrides).items()}


def cores(count: int) -> Machine:
    return replace(TWO_CORES, cores=tuple(range(count)))


def test_workers_are_numbered_by_role_prefill_first() -> None:
    assert list(planned(cores(8), "pools.prefill.replicas=2")) == ["prefill-0", "prefill-1", "decode-0"]


def test_on_two_cores_each_worker_has_its_own() -> None:
    assert binds(TWO_CORES) == {"prefill-0": "0", "decode-0": "1"}


def test_on_one_core_both_share_it() -> None:
    assert binds(cores(1)) == {"prefill-0": "0", "decode-0": "0"}


def test_more_cores_are_split_evenly() -> None:
    assert binds(cores(4)) == {"prefill-0": "0,1", "decode-0": "2,3"}


def test_with_many_cores_one_stays_free_for_the_proxy() -> None:
    assert binds(cores(8)) == {"prefill-0": "0,1,2", "decode-0": "3,4,5"}


def test_cores_that_this_process_may_use_are_used_not_the_first_ones() -> None:
    assert binds(replace(TWO_CORES, cores=(5, 9))) == {"prefill-0": "5", "decode-0": "9"}


def test_hardware_threads_are_used_only_when_cores_are_too_few() -> None:
    laptop = Machine(cores=(0, 1), siblings=(2, 3))
    assert binds(laptop) == {"prefill-0": "0", "decode-0": "1"}
    assert binds(Machine(cores=(0,), siblings=(1,))) == {"prefill-0": "0", "decode-0": "1"}


def test_ranks_of_one_worker_are_separated_in_vllms_notation() -> None:
    assert binds(cores(4), "pools.prefill.tensor_parallel=3") == {"prefill-0": "0|1|2", "decode-0": "3"}
    assert binds(TWO_CORES, "pools.decode.tensor_parallel=3") == {"prefill-0": "0", "decode-0": "1|0|1"}


@given(
    num_cores=st.integers(1, 64),
    num_siblings=st.integers(0, 64),
    replicas=st.tuples(st.integers(0, 4), st.integers(1, 4)),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_every_rank_gets_a_core_and_none_is_shared_while_they_last(
    num_cores: int, num_siblings: int, replicas: tuple[int, int], ranks: tuple[int, int]
) -> None:
    machine = Machine(tuple(range(num_cores)), tuple(range(100, 100 + num_siblings)))
    config = ClusterConfig.model_validate(
        {
            "pools": {
                role: {"replicas": replicas[index], "tensor_parallel": ranks[index]}
                for index, role in enumerate(("prefill", "decode"))
            }
        }
    )
    dealt = [cores for plan in WorkerPlanner(config, machine).first() for cores in plan.cores]
    assert len(dealt) == replicas[0] * ranks[0] + replicas[1] * ranks[1]
    assert all(dealt)
    used = [cpu for cores in dealt for cpu in cores]
    assert set(used) <= {*machine.cores, *machine.siblings}
    if len(dealt) <= num_cores + num_siblings:
        assert len(used) == len(set(used))
    assert len({len(cores) for cores in dealt}) == 1, "the same number for everybody"


def test_a_binding_of_the_operator_wins() -> None:
    plans = planned(TWO_CORES, f"pools.decode.env.{BIND}=nobind")
    assert plans["decode-0"].env[BIND] == "nobind"
    assert plans["prefill-0"].env[BIND] == "0"
    from_shell = planned(replace(TWO_CORES, environ={BIND: "auto"}))
    assert BIND not in from_shell["prefill-0"].env
    assert from_shell["prefill-0"].cores == ()


def test_kv_memory_is_two_gib_on_a_small_machine() -> None:
    assert {plan.engine["kv_cache_memory_bytes"] for plan in planned(TWO_CORES).values()} == {2 * GIB}


def test_kv_memory_shrinks_with_free_memory_and_grows_on_large_machines() -> None:
    def kv_bytes(free: int) -> int:
        value: int = planned(replace(TWO_CORES, memory_free_bytes=free))["decode-0"].engine["kv_cache_memory_bytes"]
        return value

    assert 0 < kv_bytes(1 * GIB) <= kv_bytes(6 * GIB) < 2 * GIB
    assert 2 * GIB < kv_bytes(256 * GIB) <= 8 * GIB


@given(free_mib=st.integers(4096, 1 << 20), replicas=st.integers(1, 8))
def test_default_kv_memory_and_weights_fit_into_free_memory(free_mib: int, replicas: int) -> None:
    config = load_config(None, [f"pools.decode.replicas={replicas}"])
    machine = replace(TWO_CORES, memory_free_bytes=free_mib << 20)
    plans = WorkerPlanner(config, machine, MODEL).first()
    total = sum(plan.engine["kv_cache_memory_bytes"] + MODEL.weight_bytes for plan in plans)
    least = len(plans) * ((256 << 20) + MODEL.weight_bytes)
    assert total <= max(machine.memory_free_bytes, least)


def test_kv_space_of_the_operator_wins() -> None:
    by_shell = planned(replace(TWO_CORES, environ={"VLLM_CPU_KVCACHE_SPACE": "4"}))
    assert "kv_cache_memory_bytes" not in by_shell["decode-0"].engine
    by_pool = planned(TWO_CORES, "pools.decode.env.VLLM_CPU_KVCACHE_SPACE=1")
    assert "kv_cache_memory_bytes" not in by_pool["decode-0"].engine
    assert "kv_cache_memory_bytes" in by_pool["prefill-0"].engine


def test_pool_options_win_over_common_ones_and_those_over_defaults() -> None:
    plans = planned(
        TWO_CORES,
        "engine.max_num_batched_tokens=256",
        "engine.max_num_seqs=8",
        "pools.decode.engine.max_num_seqs=64",
    )
    assert plans["prefill-0"].engine["max_num_batched_tokens"] == 256
    assert plans["prefill-0"].engine["max_num_seqs"] == 8
    assert plans["decode-0"].engine["max_num_seqs"] == 64
    assert planned(TWO_CORES)["prefill-0"].engine["max_num_batched_tokens"] == 512
    assert planned(TWO_CORES)["prefill-0"].engine["enforce_eager"] is True


def test_tensor_parallel_reaches_the_engine() -> None:
    assert planned(TWO_CORES, "pools.decode.tensor_parallel=3")["decode-0"].engine["tensor_parallel_size"] == 3


def test_a_model_on_disk_is_not_looked_up_on_a_hub() -> None:
    assert planned(TWO_CORES)["decode-0"].env["HF_HUB_OFFLINE"] == "1"
    by_name = WorkerPlanner(load_config(None, ["model=some/name"]), TWO_CORES, None).first()
    assert "HF_HUB_OFFLINE" not in by_name[0].env
    told = planned(replace(TWO_CORES, environ={"HF_HUB_OFFLINE": "0"}))
    assert "HF_HUB_OFFLINE" not in told["decode-0"].env


def test_gpus_are_dealt_in_order_without_cpu_settings() -> None:
    machine = replace(TWO_CORES, gpus=("0", "1", "2", "3", "4"))
    plans = planned(machine, "pools.prefill.replicas=2", "pools.decode.tensor_parallel=3")
    devices = {worker_id: plan.env["CUDA_VISIBLE_DEVICES"] for worker_id, plan in plans.items()}
    assert devices == {"prefill-0": "0", "prefill-1": "1", "decode-0": "2,3,4"}
    assert all(BIND not in plan.env and "kv_cache_memory_bytes" not in plan.engine for plan in plans.values())


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"need 2 GPUs, this machine shows 1.*CUDA_VISIBLE_DEVICES"):
        planned(replace(TWO_CORES, gpus=("0",)))


def test_workers_may_share_a_gpu_when_told_so() -> None:
    machine = replace(TWO_CORES, gpus=("0",))
    share = [f"pools.{role}.env.CUDA_VISIBLE_DEVICES=0" for role in ("prefill", "decode")]
    assert {plan.env["CUDA_VISIBLE_DEVICES"] for plan in planned(machine, *share).values()} == {"0"}


def test_engines_sleep_between_messages_only_where_they_compute_on_the_same_cores() -> None:
    name = "TWINPOOL_ENGINE_WAITS"
    assert planned(TWO_CORES)["decode-0"].env[name] == "asleep"
    assert planned(TWO_CORES, f"pools.decode.env.{name}=spin")["decode-0"].env[name] == "spin"
    assert name not in planned(replace(TWO_CORES, environ={name: "spin"}))["decode-0"].env
    assert name not in planned(replace(TWO_CORES, gpus=("0", "1")))["decode-0"].env


def test_workers_step_back_only_where_they_compute_on_the_proxys_cores() -> None:
    assert planned(TWO_CORES)["decode-0"].niceness == 10
    assert planned(TWO_CORES, "pools.decode.niceness=0")["decode-0"].niceness == 0
    assert planned(replace(TWO_CORES, gpus=("0", "1")))["decode-0"].niceness == 0
