import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.preflight import config_checks
from cluster.preflight.config_checks import check_config, port_problems, vllm_option_problems
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import ConfigError, Problem
from cluster.preflight.vllm_options import VllmOptions, installed_vllm_options

GIB = 1 << 30
MACHINE = Machine(cores=(0, 1), memory_free_bytes=16 * GIB)
SMOLLM2 = ModelFacts(30, 9, 3, 64, 8192, 269_000_000)
OPTIONS = VllmOptions(
    engine=frozenset({
        "max_model_len", "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_seqs", "dtype",
        "kv_cache_dtype", "hf_overrides", "enable_prefix_caching", "reasoning_parser", "tensor_parallel_size",
        "max_num_batched_tokens",
    }),
    frontend=frozenset({"api_key", "enable_auto_tool_choice", "host", "port", "uds"}),
)  # fmt: skip


@pytest.fixture(autouse=True)
def known_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "installed_vllm_options", lambda: OPTIONS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def problems_of(*overrides: str, model: ModelFacts | None = SMOLLM2, machine: Machine = MACHINE) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, [f"server.port={free_port()}", *overrides]), machine, model)
    return caught.value.problems


def problem_of(*overrides: str, model: ModelFacts | None = SMOLLM2, machine: Machine = MACHINE) -> Problem:
    problems = problems_of(*overrides, model=model, machine=machine)
    assert len(problems) == 1, problems
    return problems[0]


def test_the_defaults_pass_and_give_the_plan() -> None:
    plans = check_config(load_config(None, [f"server.port={free_port()}"]), MACHINE, SMOLLM2).workers
    assert [plan.worker_id for plan in plans] == ["prefill-0", "decode-0"]


def test_an_address_that_nobody_can_look_up_is_named() -> None:
    problem = problem_of("server.host=a..b", "server.open_to_all=true")
    assert problem.field == "server.host"
    assert "'a..b' is no address of this machine" in problem.what


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        problem = problem_of(f"server.port={port}")
    assert problem.field == "server.port"
    assert f"port {port}" in problem.what
    assert f"server.port={port + 1}" in problem.remedy


def test_an_address_of_another_machine_is_named() -> None:
    problem = problem_of("server.host=203.0.113.9", "server.options.api_key=k")
    assert problem.field == "server.host"


def test_a_server_on_a_unix_socket_needs_no_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = load_config(None, [f"server.port={other.getsockname()[1]}", "server.options.uds=/tmp/api"])
        assert port_problems(config) == []


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("engine.max_modellen=3", "Did you mean max_model_len?"),
        ("engine.enable-prefix-caching=true", "Did you mean enable_prefix_caching?"),
        ("pools.decode.engine.api_key=x", "Move it to server.options.api_key"),
        ("server.options.reasoning_parser=x", "Move it to engine.reasoning_parser"),
        ("engine.host=x", "Set server.host"),
        ("server.options.port=3", "Set server.port"),
        ("engine.zzzzz=1", "Remove it"),
        ("engine.tensor_parallel_size=2", "pools.prefill.tensor_parallel"),
        ("pools.decode.engine.kv_transfer_config={}", "Remove it"),
        ("engine.kv_events_config={}", "scheduling.prefix_events"),
        ("pools.decode.engine.max_model_len=100", "Set engine.max_model_len"),
    ],
)
def test_an_option_that_does_not_belong_there_is_named_with_the_remedy(override: str, remedy: str) -> None:
    problem = problem_of(override)
    assert problem.field == override.partition("=")[0]
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("engine.speculative_config={method: ngram, num_speculative_tokens: 2}", "draft tokens"),
        ("pools.decode.engine.spec_method=ngram", "draft tokens"),
        ("pools.prefill.engine.spec_tokens=2", "draft tokens"),
        ("engine.kv_offloading_size=1", "in the place of twinpool's"),
        ("pools.decode.engine.decode_context_parallel_size=2", "its blocks for whole ones"),
        ("engine.prefill_context_parallel_size=2", "its blocks for whole ones"),
    ],
)
def test_what_a_hand_over_does_not_follow_is_refused_with_the_reason(override: str, reason: str) -> None:
    problem = problem_of(override)
    assert problem.field == override.partition("=")[0]
    assert reason in problem.what


@pytest.mark.parametrize(
    "override",
    ["engine.speculative_config=null", "engine.kv_offloading_size=null", "engine.decode_context_parallel_size=1"],
)
def test_what_is_switched_off_may_be_written_down(override: str) -> None:
    assert vllm_option_problems(load_config(None, [override]), installed_vllm_options()) == []


def test_options_are_checked_by_the_names_vllm_has() -> None:
    config = load_config(None, ["engine.max_num_seqs=3", "server.options.api_key=x"])
    assert vllm_option_problems(config, OPTIONS) == []


@pytest.mark.parametrize("value", ["abc", "0", "-5", "1.5", "true"])
def test_numbers_that_are_none_are_named(value: str) -> None:
    problem = problem_of(f"pools.decode.engine.max_num_seqs={value}")
    assert problem.field == "pools.decode.engine.max_num_seqs"


def test_a_length_that_vllm_chooses_is_allowed() -> None:
    config = load_config(None, [f"server.port={free_port()}", "engine.max_model_len=auto"])
    assert check_config(config, MACHINE, SMOLLM2)


def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_do() -> None:
    problem = problem_of("pools.decode.tensor_parallel=2")
    assert problem.field == "pools.decode.tensor_parallel"
    assert "9 attention heads and 3 KV heads" in problem.what
    assert "1, 3, 9" in problem.remedy


def test_more_ranks_than_kv_heads_are_fine_when_they_replicate_evenly() -> None:
    llama = ModelFacts(80, 64, 8, 128, 131072, 0)
    config = load_config(
        None, [f"server.port={free_port()}", "pools.decode.tensor_parallel=16", "engine.max_model_len=1024"]
    )
    machine = replace(MACHINE, memory_free_bytes=512 * GIB)
    assert check_config(config, machine, llama)


def test_a_block_size_that_cpu_attention_refuses_is_named() -> None:
    problem = problem_of("pools.prefill.engine.block_size=48")
    assert problem.field == "pools.prefill.engine.block_size"
    assert "multiple of 32" in problem.what
    assert "64" in problem.remedy or "32" in problem.remedy


def test_any_block_size_may_be_tried_on_a_gpu() -> None:
    machine = replace(MACHINE, gpus=("0", "1"))
    assert check_config(load_config(None, [f"server.port={free_port()}", "engine.block_size=16"]), machine, SMOLLM2)


def test_kv_memory_too_small_for_one_request_is_shown_with_its_arithmetic() -> None:
    problem = problem_of("engine.kv_cache_memory_bytes=100000000")
    assert problem.field == "engine.kv_cache_memory_bytes"
    assert "65 blocks x 128 tokens x 23040 bytes = 183 MiB" in problem.what
    assert str(65 * 128 * 23040) in problem.remedy
    assert "engine.max_model_len to at most 4096" in problem.remedy


def test_the_remedies_for_small_kv_memory_work() -> None:
    port = f"server.port={free_port()}"
    for remedy in (
        ["engine.kv_cache_memory_bytes=191692800"],
        ["engine.kv_cache_memory_bytes=100000000", "engine.max_model_len=4096"],
    ):
        assert check_config(load_config(None, [port, *remedy]), MACHINE, SMOLLM2)


def test_two_pools_with_the_same_fault_are_reported_once() -> None:
    assert len(problems_of("engine.block_size=48")) == 1


def test_too_few_blocks_are_named_where_they_were_given() -> None:
    problem = problem_of("pools.prefill.engine.num_gpu_blocks_override=64")
    assert problem.field == "pools.prefill.engine.num_gpu_blocks_override"
    assert "at least 65" in problem.remedy


def test_kv_space_given_by_environment_counts() -> None:
    problem = problem_of("pools.decode.env.VLLM_CPU_KVCACHE_SPACE=90")
    assert "92,160 MiB" in problem.what or "MiB for KV caches" in problem.what


def test_a_length_beyond_the_model_is_refused() -> None:
    problem = problem_of("engine.max_model_len=9000")
    assert problem.field == "engine.max_model_len"
    assert "8192" in problem.remedy


def test_a_longer_length_is_taken_where_vllm_takes_it() -> None:
    longer = [f"server.port={free_port()}", "engine.max_model_len=9000"]
    machine = replace(MACHINE, environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert check_config(load_config(None, longer), machine, SMOLLM2)


def test_a_model_that_is_described_anew_is_not_calculated_with() -> None:
    overrides = [
        f"server.port={free_port()}",
        "engine.hf_overrides={max_position_embeddings: 9000}",
        "engine.max_model_len=9000",
    ]
    assert check_config(load_config(None, overrides), MACHINE, SMOLLM2)


def test_kv_space_that_the_shell_gives_counts() -> None:
    problem = problem_of(machine=replace(MACHINE, environ={"VLLM_CPU_KVCACHE_SPACE": "90"}))
    assert "184,320 MiB for KV caches" in problem.what


def test_more_memory_than_the_machine_has_is_refused() -> None:
    problem = problem_of("engine.kv_cache_memory_bytes=17179869184")
    assert "16,384 MiB are free" in problem.what


def test_quarter_size_kv_elements_are_counted_as_such() -> None:
    port = f"server.port={free_port()}"
    config = load_config(None, [port, "engine.kv_cache_memory_bytes=100000000", "engine.kv_cache_dtype=fp8"])
    assert check_config(config, MACHINE, SMOLLM2)


def test_a_model_known_only_by_name_is_not_calculated_with(tmp_path: Path) -> None:
    config = load_config(None, [f"server.port={free_port()}", "model=org/name", "pools.decode.tensor_parallel=7"])
    assert check_config(config, MACHINE, None)


def test_a_key_of_a_class_that_the_server_would_turn_away_is_named_by_its_place() -> None:
    classes = "slo.classes={gold: {api_keys: [known, hunter2]}}"
    problem = problem_of("server.options.api_key=[known, other]", classes)
    assert problem.field == "slo.classes.gold.api_keys.1"
    assert "hunter2" not in str(problem)
    check_config(load_config(None, [f"server.port={free_port()}", classes]), MACHINE, SMOLLM2)
