"""Llamas with random weights: a tiny one, and one of the shape of a 70B model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_SIZE = 32
"""The smallest that CPU attention takes."""
VOCABULARY = 512
CONTEXT = 2048


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    """Of what attention adds. Many layers of it make the mean of the prompt out of everything, and repeat one token."""


TINY = Shape(layers=3, heads=8, kv_heads=4, hidden=8 * HEAD_SIZE, intermediate=256)
OF_70B = Shape(
    layers=80, heads=64, kv_heads=8, hidden=64, intermediate=224, embedding_scale=20, attention_scale=0.15
)  # fmt: skip
"""As many layers, heads and KV heads, but narrow ones."""


def make_random_llama(directory: Path, shape: Shape = TINY) -> Path:
    """float32, and weights large enough that every token depends on the whole prompt by more than rounding."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(shape.embedding_scale)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(shape.attention_scale)
    model.save_pretrained(directory)
    return directory
