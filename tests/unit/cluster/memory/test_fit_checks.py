import logging
from dataclasses import replace

import pytest

from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.preflight.memory.fit_checks import fit_problems
from cluster.preflight.memory.worker_memory import WorkerMemory, worker_memory
from cluster.preflight.model_facts import ModelFacts, facts_of_config
from cluster.preflight.problems import Problem
from tests.unit.cluster.memory.models_70b import FP8, H100_BYTES, WEIGHT_BYTES, h100s, llama_70b

GIB = 1 << 30
KIB = 1 << 10
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def pools(prefill: int, decode: int, *more: str) -> list[str]:
    return [f"pools.prefill.tensor_parallel={prefill}", f"pools.decode.tensor_parallel={decode}", *more]


def problems_of(overrides: list[str], model: ModelFacts | None, machine: Machine) -> list[Problem]:
    config = load_config(None, overrides)
    return fit_problems(config, WorkerPlanner(config, machine, model).first(), machine, model)


def memory_of(overrides: list[str], model: ModelFacts, machine: Machine) -> WorkerMemory:
    """Of the prefill worker."""
    config = load_config(None, overrides)
    return worker_memory(WorkerPlanner(config, machine, model).first()[0], machine, model)


def test_the_hand_calculation_of_a_70b_model_on_four_gpus_comes_out() -> None:
    worker = memory_of(pools(4, 4, "engine.gpu_memory_utilization=0.9"), llama_70b(), h100s(8))
    assert worker.weights_of_rank == WEIGHT_BYTES / 4
    assert worker.kv_bytes_per_token == 80 * KIB
    assert worker.max_model_len == 131_072
    assert worker.request_bytes == (131_072 + 16) * 80 * KIB
    assert worker.room_bytes == pytest.approx(0.9 * H100_BYTES - WEIGHT_BYTES / 4)


def test_two_pools_of_four_gpus_hold_a_70b_model_with_its_whole_context() -> None:
    assert problems_of(pools(4, 4), llama_70b(), h100s(8)) == []


def test_too_few_ranks_are_refused_with_the_arithmetic_and_what_to_change() -> None:
    (problem,) = problems_of(pools(4, 2), llama_70b(), h100s(8))
    assert problem.field == "pools.decode.tensor_parallel"
    # 81,559 MiB are 85.5 GB; 0.92 of it 78.7; 141.1 / 2 = 70.6; 8,193 blocks of 16 tokens of 160 KiB are 21.5 GB.
    for part in ("0.92 of 85.5 GB is 78.7 GB", "70.6 GB per GPU (141.1 GB / 2)", "leaves 8.1 GB for KV",
                 "max_model_len=131072", "takes 21.5 GB (8193 blocks x 16 tokens x 160 KiB)"):  # fmt: skip
        assert part in problem.what
    assert problem.remedy.startswith("Raise it to 4, or set engine.max_model_len to at most ")
    assert "fp8 for bf16" in problem.remedy


def test_the_length_that_is_named_is_the_longest_that_fits() -> None:
    (problem,) = problems_of(pools(4, 2), llama_70b(), h100s(8))
    longest = int(problem.remedy.split("at most ")[1].split(",")[0])
    assert problems_of(pools(4, 2, f"engine.max_model_len={longest}"), llama_70b(), h100s(8)) == []
    assert problems_of(pools(4, 2, f"engine.max_model_len={longest + 17}"), llama_70b(), h100s(8))


def test_weights_alone_that_do_not_fit_are_refused_once_per_pool() -> None:
    (problem,) = set(problems_of(pools(1, 4, "pools.prefill.replicas=2"), llama_70b(), h100s(8)))
    assert problem.field == "pools.prefill.tensor_parallel"
    assert "leaves nothing for KV" in problem.what
    assert problem.remedy == "Raise it to 4"


def test_a_checkpoint_in_fp8_fits_on_half_as_many_gpus() -> None:
    assert problems_of(pools(2, 2), llama_70b(**FP8), h100s(8)) == []
    assert problems_of(pools(2, 2), llama_70b(), h100s(8))


def test_a_quantised_cache_takes_half_and_is_named_where_that_is_enough() -> None:
    small = h100s(8, 45 * GIB)
    assert "set engine.kv_cache_dtype=fp8" in problems_of(pools(4, 4), llama_70b(), small)[0].remedy
    quantised = pools(4, 4, "engine.kv_cache_dtype=fp8")
    assert problems_of(quantised, llama_70b(), small) == []
    assert memory_of(quantised, llama_70b(), small).kv_bytes_per_token == 40 * KIB


def test_a_length_that_the_engine_fits_to_the_memory_needs_only_the_weights() -> None:
    assert problems_of(pools(2, 2, "engine.max_model_len=auto"), llama_70b(), h100s(8)) == []


def test_a_request_that_leaves_nothing_for_activations_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    length = 8_000_000_000 // (160 * KIB)
    with caplog.at_level(logging.WARNING, "twinpool.preflight"):
        assert problems_of(pools(2, 2, f"engine.max_model_len={length}"), llama_70b(), h100s(8)) == []
    assert "activations" in caplog.text


def test_a_latent_cache_is_copied_to_every_rank() -> None:
    model = facts_of_config(DEEPSEEK_V3, 0)
    machine = h100s(16, 141 * 10**9)
    worker = memory_of(pools(8, 8), model, machine)
    assert worker.kv_bytes_per_token == 61 * 576 * 2
    assert worker.weights_bytes == pytest.approx(671e9, rel=0.005)
    assert problems_of(pools(8, 8), model, machine) == []
    assert problems_of(pools(8, 8), model, h100s(16))[0].what.endswith("which leaves nothing for KV")


@pytest.mark.parametrize(
    ("overrides", "model", "machine", "why"),
    [
        ([], llama_70b(architectures=["BrandNewForCausalLM"]), h100s(8), "weights"),
        ([], None, h100s(8), "weights"),
        (["engine.cpu_offload_gb=60"], llama_70b(), h100s(8), "weights"),
        (["engine.kv_cache_dtype=int4_per_token_head"], llama_70b(), h100s(8), "KV"),
        (["engine.decode_context_parallel_size=2"], llama_70b(), h100s(8), "KV"),
        ([], llama_70b(sliding_window=4096), h100s(8), "KV"),
        ([], llama_70b(), replace(h100s(8), gpu_memory={}), "memory of GPU 0"),
        ([], llama_70b(), replace(h100s(8), gpus=("MIG-a", "MIG-b")), "memory of GPU MIG-a"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_said_and_not_refused(
    overrides: list[str],
    model: ModelFacts | None,
    machine: Machine,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "twinpool.preflight"):
        assert problems_of(pools(1, 1, *overrides), model, machine) == []
    assert "prefill-0: whether it fits" in caplog.text
    assert why in caplog.text


def share(*more: str) -> list[str]:
    return [*(f"pools.{role}.env.CUDA_VISIBLE_DEVICES=0" for role in ("prefill", "decode")), *more]


SMALL = facts_of_config({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}, 0)  # fmt: skip


def test_workers_that_share_a_gpu_may_not_ask_for_more_than_all_of_it() -> None:
    (problem,) = problems_of(share(), SMALL, h100s(1))
    assert "prefill-0, decode-0 share GPU 0 and would take 0.92 + 0.92 of it" in problem.what
    assert problem.remedy.startswith("Set it to at most 0.5")
    assert problems_of(share("engine.gpu_memory_utilization=0.5"), SMALL, h100s(1)) == []


def test_workers_that_share_a_gpu_with_given_caches_are_added_up() -> None:
    given = share("engine.kv_cache_memory_bytes=4294967296")
    assert problems_of(given, SMALL, h100s(1)) == []
    (problem,) = problems_of(given, SMALL, h100s(1, 12 * GIB))
    assert problem.what.startswith("prefill-0, decode-0 share GPU 0 and need at least")


def test_a_cache_larger_than_the_gpu_is_refused() -> None:
    (problem,) = problems_of(["pools.decode.engine.kv_cache_memory_bytes=90000000000"], SMALL, h100s(2))
    assert problem.field == "pools.decode.tensor_parallel"
    assert "pools.decode.engine.kv_cache_memory_bytes" in problem.remedy


def test_workers_on_one_machine_without_gpus_add_up() -> None:
    machine = Machine(cores=(0, 1), memory_free_bytes=300 * 10**9)
    one = pools(1, 2, "engine.max_model_len=1024", "engine.kv_cache_memory_bytes=1073741824")
    (problem,) = problems_of([*one, "pools.decode.replicas=2"], llama_70b(), machine)
    # 141,107,412,992 bytes are 134,571 MiB.
    assert "3 workers need 403,712 MiB for weights and 5,120 MiB for KV caches" in problem.what
    assert "decode-1 134,571 MiB + 2 x 1,024 MiB" in problem.what
    assert problem.field == "model"
    assert problems_of(one, llama_70b(), machine) == []
    (larger,) = problems_of([*one, "pools.decode.engine.kv_cache_memory_bytes=17179869184"], llama_70b(), machine)
    assert larger.field == "engine.kv_cache_memory_bytes"


def test_blocks_given_by_number_are_what_a_cache_takes_on_cpus() -> None:
    machine = Machine(cores=(0, 1), memory_free_bytes=16 * GIB)
    overrides = ["engine.num_gpu_blocks_override=65", "engine.dtype=bfloat16"]
    assert memory_of(overrides, SMALL, machine).kv_given_bytes == 65 * 128 * 16 * 2 * 8 * 64 * 2
