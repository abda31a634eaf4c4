"""How many weights a model has, what a token's KV takes and what a token costs: from its `config.json` alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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

    @property
    def width(self) -> int:
        """Elements of a token in the cache of one layer."""
        return self.kv_rank + self.rope_size


@dataclass(frozen=True)
class ModelShape:
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

    @cached_property
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

    @cached_property
    def expert_weights(self) -> int:
        """Of one expert, over all layers that have experts."""
        experts = self.experts
        return (self.layers - experts.first_dense_layers) * self._feed_forward(experts.width) if experts else 0

    @cached_property
    def weights(self) -> int:
        """All of them."""
        total = self.dense_weights + (0 if self.ties_embeddings else self.vocabulary * self.hidden)
        return total + (self.experts.total * self.expert_weights if self.experts else 0)

    @cached_property
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

    @property
    def vocabulary_weights(self) -> int:
        """Input embedding and output layer, which stay as they are when a model is quantised."""
        return (1 if self.ties_embeddings else 2) * self.vocabulary * self.hidden

    def bytes_of_weights(self, bytes_per_weight: float) -> float:
        """All weights; of a quantised model without scales, and with embeddings of two bytes."""
        rest = self.weights - self.vocabulary_weights
        return rest * bytes_per_weight + self.vocabulary_weights * max(2.0, bytes_per_weight)

    def kv_bytes_per_token(self, element_bytes: float = 2, tensor_parallel: int = 1) -> float:
        """Over all layers, on one of so many ranks."""
        latent = self.latent.width if self.latent else None
        return element_bytes * kv_elements(self.layers, self.kv_heads, self.head_size, latent, tensor_parallel)

    def attention_flop(self, num_tokens: float, already: float = 0) -> float:
        """Of a prompt, or the part of it after `already` tokens, over all layers.

        It multiplies twice (scores, values), 2 FLOP each, over the part of the square that is not masked.
        """
        latent = self.latent
        size = latent.nope_size + latent.rope_size + latent.value_size if latent else 2 * self.head_size
        return 2 * self.layers * self.heads * size * num_tokens * (already + num_tokens / 2)


def kv_elements(layers: int, kv_heads: int, head_size: int, latent_width: int | None, tensor_parallel: int) -> int:
    """Elements of K and V that one rank keeps of a token, over all layers.

    Heads are shared out until each rank has one, then copied; a latent, if there is one, is copied to every rank.
    """
    if latent_width is not None:
        return layers * latent_width
    return layers * 2 * max(1, kv_heads // tensor_parallel) * head_size


def read_config(name: str, config: Mapping[str, Any]) -> ModelShape:
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
    return ModelShape(
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
