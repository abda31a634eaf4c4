"""A tiny Llama with random weights and four KV heads, so that one, two or four ranks can share them out."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUM_LAYERS = 3
NUM_KV_HEADS = 4
HEAD_SIZE = 32
VOCABULARY = 512
CONTEXT = 2048


def make_random_llama(directory: Path) -> Path:
    """float32, and weights large enough that every token depends on the whole prompt by more than rounding."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=8 * HEAD_SIZE,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory
