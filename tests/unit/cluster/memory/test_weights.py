import json
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight.memory.weights import file_bytes, quantized_bytes, quantizes_kv, shape_of, weights_at_least
from tests.unit.cluster.memory.models_70b import FP8, LLAMA_70B, WEIGHT_BYTES

VOCABULARY_BYTES = 2 * 128_256 * 8192 * 2
"""Input embedding and output layer in bf16."""


def write(directory: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (directory / f"{name}.safetensors").write_bytes(bytes(size))


def test_a_70b_model_in_bf16_has_141_gb_of_weights() -> None:
    assert weights_at_least(shape_of(LLAMA_70B), 0, None, {}) == WEIGHT_BYTES
    assert weights_at_least(shape_of(LLAMA_70B), 0, None, {"dtype": "bfloat16"}) == WEIGHT_BYTES
    assert weights_at_least(shape_of(LLAMA_70B), 0, None, {"dtype": "float32"}) == 2 * WEIGHT_BYTES


def test_files_of_another_type_than_the_engine_computes_in_do_not_count() -> None:
    assert weights_at_least(shape_of(LLAMA_70B), 2 * WEIGHT_BYTES, None, {"dtype": "auto"}) == WEIGHT_BYTES


def test_quantising_leaves_the_vocabulary_as_it_is() -> None:
    eight_bits = (WEIGHT_BYTES - VOCABULARY_BYTES) // 2 + VOCABULARY_BYTES
    assert weights_at_least(shape_of(LLAMA_70B), 0, 1.0, {}) == eight_bits
    assert weights_at_least(shape_of(LLAMA_70B), 0, None, {"quantization": "fp8"}) == eight_bits
    assert (
        weights_at_least(shape_of(LLAMA_70B), 0, 0.5, {}) == (WEIGHT_BYTES - VOCABULARY_BYTES) // 4 + VOCABULARY_BYTES
    )


def test_smaller_files_of_a_quantised_checkpoint_win() -> None:
    assert weights_at_least(shape_of(LLAMA_70B), 40_000_000_000, 1.0, {}) == 40_000_000_000
    assert weights_at_least(shape_of(LLAMA_70B), 40_000_000_000, 0.0, {}) == 40_000_000_000


@pytest.mark.parametrize(
    ("checkpoint_bytes", "engine"), [(0.0, {}), (None, {"quantization": "experts_int8"}), (None, {"quantization": "x"})]
)
def test_what_a_method_makes_of_weights_is_not_guessed(checkpoint_bytes: float | None, engine: dict[str, Any]) -> None:
    assert weights_at_least(shape_of(LLAMA_70B), 0, checkpoint_bytes, engine) is None


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (FP8["quantization_config"], 1.0),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "compressed-tensors", "config_groups": None}, 0.0),
        ({"quant_method": "brand-new"}, 0.0),
        (None, None),
        ("fp8", None),
    ],
)
def test_bytes_of_a_quantised_weight_are_read(quantization: object, expected: float | None) -> None:
    assert quantized_bytes({"quantization_config": quantization}) == expected


def test_a_checkpoint_may_bring_a_quantised_cache() -> None:
    assert quantizes_kv({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}})
    assert not quantizes_kv({"quantization_config": {"kv_cache_scheme": None}})
    assert not quantizes_kv({})


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["BrandNewForCausalLM"]},
        {"architectures": None},
        {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [3]},
        {"intermediate_size": None},
        {"vocab_size": "many"},
    ],
)
def test_weights_of_what_is_not_known_are_not_computed(changes: dict[str, Any]) -> None:
    assert shape_of({**LLAMA_70B, **changes}) is None


def test_files_that_an_index_names_are_counted_once(tmp_path: Path) -> None:
    write(tmp_path, **{"model-1": 100, "model-2": 50, "consolidated": 150})
    assert file_bytes(tmp_path) == 150
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(150))
    assert file_bytes(tmp_path) == 150
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert file_bytes(tmp_path) == 100


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_passed_over(tmp_path: Path, text: str) -> None:
    write(tmp_path, model=70)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert file_bytes(tmp_path) == 70


def test_a_directory_without_weights_has_none(tmp_path: Path) -> None:
    assert file_bytes(tmp_path) == 0
