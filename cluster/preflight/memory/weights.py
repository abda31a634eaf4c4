"""How many bytes the weights of a model take: on disk, and at least in an engine's memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.preflight.memory.model_shape import ModelShape, read_config

# Decoders with gated feed-forward layers, whose weights and cache `ModelShape` computes exactly.
_COMPUTED = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM",
    "GraniteForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
})  # fmt: skip
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# Bytes of a quantised weight without its scales, by `quant_method`, where the method alone says it.
_METHOD_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 0.5}
# Methods that say it in a field, and which.
_METHOD_BITS = {"gptq": "bits", "awq": "bits", "gptq_marlin": "bits", "awq_marlin": "bits"}
# vLLM's `quantization` option for a checkpoint that is not quantised itself.
_ONLINE_BYTES = {
    "fp8": 1.0, "fp8_per_tensor": 1.0, "fp8_per_block": 1.0, "fp8_per_channel": 1.0,
    "int8_per_channel_weight_only": 1.0, "mxfp8": 1.0,
}  # fmt: skip
_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def file_bytes(directory: Path) -> int:
    """Size of the weights that vLLM would load, 0 if there are none. Copies in other formats are not counted."""
    for name in _INDEX_FILES:
        if named := _named_in(directory / name):
            return sum(_size(directory / file) for file in named)
    files = list(directory.glob("*.safetensors"))
    files = [file for file in files if not file.name.startswith("consolidated")] or files
    return sum(map(_size, files or directory.glob("*.bin")))


def _named_in(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def known_architecture(config: Mapping[str, Any]) -> bool:
    """Whether the cache of a model can be computed. A configuration that names no architecture counts as a Llama."""
    names = config.get("architectures")
    return not names or (isinstance(names, list) and set(map(str, names)) <= _COMPUTED)


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """What weights can be computed from; None for an architecture that this arithmetic does not cover."""
    if not config.get("architectures") or not known_architecture(config):
        return None
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        return None  # some of its layers have experts, some have none
    try:
        return read_config(str(config["architectures"][0]), config)
    except (KeyError, TypeError, ValueError):
        return None


def quantized_bytes(config: Mapping[str, Any]) -> float | None:
    """Bytes per weight of a quantised checkpoint, without scales; 0 if the method is unknown, None if it is not one."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantization, Mapping):
        return None
    method = str(quantization.get("quant_method", ""))
    if method in _METHOD_BYTES:
        return _METHOD_BYTES[method]
    bits: object = None
    if method in _METHOD_BITS:
        bits = quantization.get(_METHOD_BITS[method])
    elif method == "bitsandbytes":
        bits = 8 if quantization.get("load_in_8bit") else 4
    elif method == "compressed-tensors":
        bits = min(_group_bits(quantization), default=None)
    return bits / 8 if isinstance(bits, int) else 0.0


def _group_bits(quantization: Mapping[str, Any]) -> list[int]:
    groups = quantization.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    bits = [of.get("num_bits") for of in weights if isinstance(of, Mapping)]
    return [number for number in bits if isinstance(number, int)]


def quantizes_kv(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint asks for a quantised cache where `kv_cache_dtype` is left at `auto`."""
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    return isinstance(quantization, Mapping) and bool(
        quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    )


def weights_at_least(
    shape: ModelShape | None, on_disk: int, checkpoint_bytes: float | None, engine: Mapping[str, Any]
) -> int | None:
    """Bytes of all weights in memory, at least; None if that cannot be told.

    `checkpoint_bytes` is what `quantized_bytes` says, `engine` are vLLM's options.
    """
    if checkpoint_bytes is not None:
        computed = int(shape.bytes_of_weights(checkpoint_bytes)) if shape is not None and checkpoint_bytes else None
        found = [size for size in (computed, on_disk) if size]
        return min(found, default=None)
    if shape is None:
        return None
    if engine.get("quantization"):
        per_weight = _ONLINE_BYTES.get(str(engine["quantization"]))
        return int(shape.bytes_of_weights(per_weight)) if per_weight else None
    return int(shape.bytes_of_weights(_DTYPE_BYTES.get(str(engine.get("dtype")), 2)))
