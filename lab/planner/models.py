"""How many weights a model has, what a token's KV takes and what a token costs: from its `config.json` alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnknownModel(ValueError):
    """No such short name, no such file, or a configuration this arithmetic does not cover; a sentence."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    total: int
    per_token: int
    width: int
    """Intermediate size of one."""
    shared: int = 0
    first_dense_layers: int = 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one compressed head for all."""

    kv_rank: int
    rope_size: int
    q_rank: int
    """0: queries are not compressed."""
    nope_size: int
    value_size: int


@dataclass(frozen=True)
class Model:
    """A decoder with gated feed-forward layers. Sizes in elements."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    ties_embeddings: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    context: int = 131_072
    weight_bytes: float = 2
    """Per weight, as published."""

    @property
    def attention_weights(self) -> int:
        """Of one layer."""
        if latent := self.latent:
            query = latent.nope_size + latent.rope_size
            queries = (
                self.hidden * latent.q_rank + latent.q_rank * self.heads * query
                if latent.q_rank
                else self.hidden * self.heads * query
            )
            down = self.hidden * (latent.kv_rank + latent.rope_size)
            up = latent.kv_rank * self.heads * (latent.nope_size + latent.value_size)
            return queries + down + up + self.heads * latent.value_size * self.hidden
        return self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)

    def _feed_forward(self, width: int) -> int:
        return 3 * self.hidden * width

    @property
    def dense_weights(self) -> int:
        """All that every token uses, the output layer included, the input embedding not."""
        experts = self.experts
        dense_layers = experts.first_dense_layers if experts else self.layers
        weights = self.layers * (self.attention_weights + 2 * self.hidden)
        weights += dense_layers * self._feed_forward(self.intermediate)
        if experts:
            sparse = self.layers - dense_layers
            weights += sparse * (experts.shared * self._feed_forward(experts.width) + self.hidden * experts.total)
        return weights + self.vocabulary * self.hidden + self.hidden

    @property
    def expert_weights(self) -> int:
        """Of one expert, over all layers that have experts."""
        experts = self.experts
        return (self.layers - experts.first_dense_layers) * self._feed_forward(experts.width) if experts else 0

    @property
    def weights(self) -> int:
        """All of them."""
        total = self.dense_weights + (0 if self.ties_embeddings else self.vocabulary * self.hidden)
        return total + (self.experts.total * self.expert_weights if self.experts else 0)

    @property
    def active_weights(self) -> int:
        """That one token is multiplied with."""
        return self.dense_weights + (self.experts.per_token * self.expert_weights if self.experts else 0)

    def weights_read(self, num_tokens: float) -> float:
        """Distinct weights that a step over so many tokens reads, if tokens choose experts evenly.

        An expert stays unread with probability (1 - per_token/total)^tokens.
        """
        if not (experts := self.experts):
            return self.weights
        unread = math.pow(1 - experts.per_token / experts.total, max(1.0, num_tokens))
        return self.weights - experts.total * unread * self.expert_weights

    def kv_bytes_per_token(self, element_bytes: float = 2) -> float:
        """Over all layers."""
        if latent := self.latent:
            return self.layers * (latent.kv_rank + latent.rope_size) * element_bytes
        return self.layers * 2 * self.kv_heads * self.head_size * element_bytes

    def kv_share(self, tensor_parallel: int) -> float:
        """Of a token's KV that one rank holds: heads are split until each rank has one, then copied."""
        heads = 1 if self.latent else self.kv_heads
        return 1 / min(tensor_parallel, heads)

    def attention_flop(self, num_tokens: float, already: float = 0) -> float:
        """Of a prompt, or the part of it after `already` tokens, over all layers.

        It multiplies twice (scores, values), 2 FLOP each, over the part of the square that is not masked.
        """
        latent = self.latent
        size = latent.nope_size + latent.rope_size + latent.value_size if latent else 2 * self.head_size
        return 2 * self.layers * self.heads * size * num_tokens * (already + num_tokens / 2)


MODELS = {
    model.name: model
    for model in (
        # From the `config.json` that their makers published.
        Model("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49_152, ties_embeddings=True, context=8192),
        Model("llama-3.1-8b", 4096, 32, 32, 8, 128, 14_336, 128_256),
        Model("llama-3.1-70b", 8192, 80, 64, 8, 128, 28_672, 128_256),
        Model("llama-3.1-405b", 16_384, 126, 128, 8, 128, 53_248, 128_256),
        Model("qwen2.5-7b", 3584, 28, 28, 4, 128, 18_944, 152_064),
        Model("qwen2.5-72b", 8192, 80, 64, 8, 128, 29_568, 152_064),
        Model("qwen3-32b", 5120, 64, 64, 8, 128, 25_600, 151_936, context=40_960),
        Model("qwen3-235b-a22b", 4096, 94, 64, 4, 128, 12_288, 151_936, experts=Experts(128, 8, 1536), context=40_960),
        Model(
            "deepseek-v3", 7168, 61, 128, 128, 128, 18_432, 129_280,
            experts=Experts(256, 8, 2048, shared=1, first_dense_layers=3), latent=Latent(512, 64, 1536, 128, 128),
            context=163_840, weight_bytes=1,
        ),
    )
}  # fmt: skip


def find_model(name: str) -> Model:
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
        return read_config(path.name, json.loads(file.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownModel(f"{file} is no configuration this can be computed from: {error!r}") from error


def read_config(name: str, config: Mapping[str, Any]) -> Model:
    """From the fields that transformers writes. Raises KeyError for what is missing."""
    config = config.get("text_config", config)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    num_experts = int(
        config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0
    )
    experts = None
    if num_experts:
        experts = Experts(
            num_experts,
            int(config["num_experts_per_tok"]),
            int(config.get("moe_intermediate_size") or config["intermediate_size"]),
            int(config.get("n_shared_experts") or 0),
            int(config.get("first_k_dense_replace") or 0),
        )
    latent = None
    if config.get("kv_lora_rank"):
        latent = Latent(
            int(config["kv_lora_rank"]),
            int(config["qk_rope_head_dim"]),
            int(config.get("q_lora_rank") or 0),
            int(config["qk_nope_head_dim"]),
            int(config["v_head_dim"]),
        )
    return Model(
        name=name,
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        latent=latent,
        context=int(config.get("max_position_embeddings") or 131_072),
        weight_bytes=1 if (config.get("quantization_config") or {}).get("quant_method") == "fp8" else 2,
    )
