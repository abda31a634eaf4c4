"""Models by short name, or from a `config.json`."""

import json
from dataclasses import replace
from pathlib import Path

from cluster.preflight.memory.model_shape import Experts, Latent, ModelShape, read_config
from cluster.preflight.memory.weights import quantized_bytes


class UnknownModel(ValueError):
    """No such short name, no such file, or a configuration this arithmetic does not cover; a sentence."""


MODELS = {
    model.name: model
    for model in (
        # From the `config.json` that their makers published.
        ModelShape("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49_152, ties_embeddings=True, context=8192),
        ModelShape("llama-3.1-8b", 4096, 32, 32, 8, 128, 14_336, 128_256),
        ModelShape("llama-3.1-70b", 8192, 80, 64, 8, 128, 28_672, 128_256),
        ModelShape("llama-3.1-405b", 16_384, 126, 128, 8, 128, 53_248, 128_256),
        ModelShape("qwen2.5-7b", 3584, 28, 28, 4, 128, 18_944, 152_064),
        ModelShape("qwen2.5-72b", 8192, 80, 64, 8, 128, 29_568, 152_064),
        ModelShape("qwen3-32b", 5120, 64, 64, 8, 128, 25_600, 151_936, context=40_960),
        ModelShape(
            "qwen3-235b-a22b", 4096, 94, 64, 4, 128, 12_288, 151_936, experts=Experts(128, 8, 1536), context=40_960,
        ),
        ModelShape(
            "deepseek-v3", 7168, 61, 128, 128, 128, 18_432, 129_280,
            experts=Experts(256, 8, 2048, shared=1, first_dense_layers=3), latent=Latent(512, 64, 1536, 128, 128),
            context=163_840, weight_bytes=1,
        ),
    )
}  # fmt: skip


def find_model(name: str) -> ModelShape:
    """By short name, or from a `config.json` or the directory with one. Raises `UnknownModel`."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModel(
            f"{name} is neither a directory with a config.json nor one of {', '.join(MODELS)}; name one of these"
        )
    try:
        config = json.loads(file.read_text())
        shape = read_config(path.name, config)
        return replace(shape, weight_bytes=quantized_bytes(config) or shape.weight_bytes)
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownModel(f"{file} is no configuration this can be computed from: {error!r}") from error
