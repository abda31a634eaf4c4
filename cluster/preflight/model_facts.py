"""What a model directory says about the memory and the ranks that the model needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.preflight.memory.model_shape import ModelShape, kv_elements
from cluster.preflight.memory.weights import file_bytes, known_architecture, quantized_bytes, quantizes_kv, shape_of
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
    """Of the files; 0 if there are none."""
    latent_width: int | None = None
    """Elements of a token's cache in a layer with latent attention (MLA)."""
    shape: ModelShape | None = None
    """What weights are computed from; None for an unknown architecture."""
    quantized_bytes: float | None = None
    """Per weight of a quantised checkpoint, see `weights.quantized_bytes`."""
    quantizes_kv: bool = False
    """The checkpoint has a quantised cache unless told otherwise."""

    def kv_bytes_per_token(self, tensor_parallel: int, element_bytes: int) -> int | None:
        """Bytes of K and V of one token on one rank."""
        if self.num_layers is None or self.num_kv_heads is None or self.head_size is None:
            return None
        return element_bytes * kv_elements(
            self.num_layers, self.num_kv_heads, self.head_size, self.latent_width, tensor_parallel
        )

    def heads_divide(self, ranks: int) -> bool:
        """Whether every rank gets whole heads, and KV heads are shared or copied evenly."""
        if self.num_heads is None or self.num_heads % ranks:
            return False
        return self.num_kv_heads is None or self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0


def kv_element_bytes(dtype: object, kv_cache_dtype: object) -> int | None:
    """Bytes of one K or V element, None for less than one; vLLM's `auto` is two bytes also for float32 checkpoints."""
    if kv_cache_dtype is None or kv_cache_dtype == "auto":
        return _DTYPE_BYTES.get(str(dtype), 2)
    if str(kv_cache_dtype).startswith(("fp8", "int8")):
        return 1
    return _DTYPE_BYTES.get(str(kv_cache_dtype))


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
    return facts_of_config(config if isinstance(config, dict) else {}, file_bytes(directory))


def facts_of_config(config: dict[str, Any], weight_bytes: int) -> ModelFacts:
    """From the fields of a `config.json`, and the size of the files with weights."""
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
        latent_width=_latent_width(config),
        shape=shape_of(config),
        quantized_bytes=quantized_bytes(config),
        quantizes_kv=quantizes_kv(config),
    )


def _latent_width(config: dict[str, Any]) -> int | None:
    rank, rope = _int(config, "kv_lora_rank"), _int(config, "qk_rope_head_dim")
    return rank + rope if rank and rope else None


def _has_one_kind_of_attention(config: dict[str, Any]) -> bool:
    """False for sliding-window, linear and hybrid models, and unknown ones: their KV size follows other rules."""
    if not known_architecture(config) or (config.get("kv_lora_rank") and _latent_width(config) is None):
        return False
    # Some models name a window and say beside it that it is not used.
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        return False
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["full_attention"]
    return set(kinds) <= {"full_attention", "attention"}


def _scales_positions(config: dict[str, Any]) -> bool:
    """Whether the longest sequence is another one than `max_position_embeddings` says."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    return kind not in ("default", "llama3")


def _int(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
