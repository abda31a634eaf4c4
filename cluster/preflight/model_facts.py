"""What a model directory says about the memory and the ranks that the model needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.preflight.problems import ConfigError, Problem

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Of a model with one kind of attention; what cannot be told for sure is None and is not checked."""

    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None
    max_positions: int | None
    """Longest sequence the model was made for; None also when it scales its positions."""
    weight_bytes: int

    def kv_bytes_per_token(self, tensor_parallel: int, element_bytes: int) -> int | None:
        """Bytes of K and V of one token on one rank."""
        if self.num_layers is None or self.num_kv_heads is None or self.head_size is None:
            return None
        heads_of_rank = max(1, self.num_kv_heads // tensor_parallel)
        return 2 * self.num_layers * heads_of_rank * self.head_size * element_bytes


def kv_element_bytes(dtype: object, kv_cache_dtype: object) -> int:
    """Bytes of one K or V element; vLLM's `auto` is two bytes also for float32 checkpoints."""
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype.startswith(("fp8", "int8")):
        return 1
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype in _DTYPE_BYTES:
        return _DTYPE_BYTES[kv_cache_dtype]
    return _DTYPE_BYTES.get(str(dtype), 2)


def looks_like_path(model: str) -> bool:
    """Whether `model` can only mean a directory, not a name on a model hub (`owner/name`)."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).expanduser().exists()


def read_model_facts(model: str) -> ModelFacts | None:
    """Facts of a model directory, None for a hub name; raises `ConfigError` when the directory is no model."""
    if not looks_like_path(model):
        return None
    directory = Path(model).expanduser()
    config_path = directory / "config.json"
    if not directory.exists():
        raise ConfigError(
            [
                Problem(
                    "model",
                    f"the directory {directory} does not exist",
                    "Correct the path, or leave `model` out for the embedded model",
                )
            ]
        )
    try:
        config = json.loads(config_path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                Problem(
                    "model",
                    f"cannot read {config_path}: {error}",
                    "Name a directory in Hugging Face layout (config.json, weights, tokenizer)",
                )
            ]
        ) from error
    weights = sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))
    return _facts(config if isinstance(config, dict) else {}, weights)


def _facts(config: dict[str, Any], weight_bytes: int) -> ModelFacts:
    heads = _int(config, "num_attention_heads")
    hidden = _int(config, "hidden_size")
    head_size = _int(config, "head_dim") or (hidden // heads if hidden and heads else None)
    uniform = _has_one_kind_of_attention(config)
    return ModelFacts(
        num_layers=_int(config, "num_hidden_layers") if uniform else None,
        num_heads=heads,
        num_kv_heads=(_int(config, "num_key_value_heads") or heads) if uniform else None,
        head_size=head_size if uniform else None,
        max_positions=None if _scales_positions(config) else _int(config, "max_position_embeddings"),
        weight_bytes=weight_bytes,
    )


def _has_one_kind_of_attention(config: dict[str, Any]) -> bool:
    """False for latent (MLA), sliding-window, linear and hybrid models: their KV size follows other rules."""
    if config.get("kv_lora_rank") or config.get("sliding_window"):
        return False
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["full_attention"]
    return set(kinds) <= {"full_attention", "attention"}


def _scales_positions(config: dict[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    return kind != "default"


def _int(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
