import json
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight.model_facts import ModelFacts, kv_element_bytes, read_model_facts
from cluster.preflight.problems import ConfigError

LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 8192,
}


def model_dir(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(tmp_path)


def facts(tmp_path: Path, **changes: Any) -> ModelFacts:
    found = read_model_facts(model_dir(tmp_path, **changes))
    assert found is not None
    return found


def test_a_70b_model_has_320_kib_of_kv_per_token(tmp_path: Path) -> None:
    assert facts(tmp_path).kv_bytes_per_token(1, 2) == 320 << 10


def test_ranks_share_kv_heads_and_replicate_them_when_they_are_more(tmp_path: Path) -> None:
    model = facts(tmp_path)
    assert model.kv_bytes_per_token(4, 2) == 80 << 10
    assert model.kv_bytes_per_token(16, 2) == model.kv_bytes_per_token(8, 2)


def test_weights_are_counted(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(100))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(50))
    assert facts(tmp_path).weight_bytes == 150


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lora_rank": 512},
        {"architectures": ["BrandNewForCausalLM"]},
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"num_hidden_layers": "many"},
    ],
)
def test_kv_of_other_kinds_of_attention_is_not_guessed(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert facts(tmp_path, **changes).kv_bytes_per_token(1, 2) is None


def test_a_window_that_is_not_used_changes_nothing(tmp_path: Path) -> None:
    assert facts(tmp_path, sliding_window=4096, use_sliding_window=False).kv_bytes_per_token(1, 2) == 320 << 10


def test_a_latent_cache_is_the_same_on_every_rank(tmp_path: Path) -> None:
    model = facts(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)
    assert model.kv_bytes_per_token(1, 2) == model.kv_bytes_per_token(8, 2) == 80 * 576 * 2


def test_the_limit_of_a_model_that_scales_positions_is_not_guessed(tmp_path: Path) -> None:
    assert facts(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4}).max_positions is None
    assert facts(tmp_path, rope_parameters={"rope_type": "default"}).max_positions == 8192
    # Llama 3.1 counts its scaled positions itself.
    assert facts(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 8}).max_positions == 8192


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model: the directory /no/such/model does not exist"):
        read_model_facts("/no/such/model")


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_directory_that_is_no_model_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    if text == "[1]":
        found = read_model_facts(str(tmp_path))
        assert found is not None
        assert found.num_layers is None
    else:
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_model_facts(str(tmp_path))


def test_a_name_on_a_hub_is_left_to_vllm() -> None:
    assert read_model_facts("meta-llama/Llama-3.1-70B-Instruct") is None


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "expected"),
    [
        (None, None, 2),
        ("auto", "auto", 2),
        ("float32", "auto", 4),
        ("bfloat16", "fp8_e4m3", 1),
        ("float32", "half", 2),
        ("bfloat16", "nvfp4", None),
    ],
)
def test_bytes_of_a_kv_element(dtype: str | None, kv_dtype: str | None, expected: int | None) -> None:
    assert kv_element_bytes(dtype, kv_dtype) == expected
