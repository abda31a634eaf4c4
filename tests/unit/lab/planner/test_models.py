import json
from pathlib import Path

import pytest

from cluster.preflight.memory.model_shape import read_config
from lab.planner.models import MODELS, UnknownModel, find_model
from tests.unit.cluster.memory.models_70b import FP8, LLAMA_70B

KIB = 1024


@pytest.mark.parametrize(
    ("name", "billions", "active_billions", "kv_kib"),
    [
        ("llama-3.1-8b", 8.03, 7.50, 128),
        ("llama-3.1-70b", 70.55, 69.5, 320),
        ("llama-3.1-405b", 405.9, 403.8, 504),
        ("qwen2.5-7b", 7.62, 7.07, 56),
        ("qwen2.5-72b", 72.7, 71.5, 320),
        ("qwen3-32b", 32.8, 32.0, 256),
        ("qwen3-235b-a22b", 235, 21.6, 188),
        ("deepseek-v3", 671, 36.6, 68.625),
        ("smollm2-135m", 0.1345, 0.1345, 22.5),
    ],
)
def test_weights_and_kv_are_those_that_are_published(
    name: str, billions: float, active_billions: float, kv_kib: float
) -> None:
    model = MODELS[name]
    assert model.weights / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.active_weights / 1e9 == pytest.approx(active_billions, rel=0.005)
    assert model.kv_bytes_per_token() / KIB == kv_kib


def test_a_configuration_says_the_same_as_the_short_name(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_model(str(tmp_path))
    assert found.weights == MODELS["llama-3.1-8b"].weights
    assert found.kv_bytes_per_token() == MODELS["llama-3.1-8b"].kv_bytes_per_token()


def test_bytes_of_a_quantised_weight_are_read_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, **FP8}))
    model = find_model(str(tmp_path))
    assert model.weight_bytes == 1
    # 70.55 billion weights, of which 2.1 billion of the vocabulary keep two bytes.
    assert model.bytes_of_weights(model.weight_bytes) == 70_553_706_496 + 2 * 128_256 * 8192


def test_latent_attention_and_experts_are_read_from_a_configuration() -> None:
    config = {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 128,
        "quantization_config": {"quant_method": "fp8"}, "max_position_embeddings": 163840,
    }  # fmt: skip
    assert read_config("deepseek-v3", config) == MODELS["deepseek-v3"]


def test_ranks_share_heads_until_each_has_one() -> None:
    kib = [MODELS["llama-3.1-70b"].kv_bytes_per_token(2, ranks) / KIB for ranks in (1, 4, 8, 16)]
    assert kib == [320, 80, 40, 40]
    deepseek = MODELS["deepseek-v3"]
    assert deepseek.kv_bytes_per_token(2, 8) == deepseek.kv_bytes_per_token(2)


def test_a_small_step_reads_few_experts_and_a_large_one_all() -> None:
    model = MODELS["deepseek-v3"]
    assert model.weights_read(1) == pytest.approx(model.active_weights + model.vocabulary * model.hidden, rel=1e-6)
    assert model.weights_read(4096) == pytest.approx(model.weights, rel=1e-6)


@pytest.mark.parametrize(("text", "complaint"), [("gpt-9", "neither"), ("{}", "num_attention_heads"), ("{", "Error")])
def test_what_cannot_be_planned_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    name = text
    if text.startswith("{"):
        (tmp_path / "config.json").write_text(text)
        name = str(tmp_path)
    with pytest.raises(UnknownModel, match=complaint):
        find_model(name)
