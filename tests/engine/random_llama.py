"""A Llama of the shape of a 70B model with random weights: as many layers, heads and KV heads, but narrow ones."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUM_LAYERS = 80
NUM_HEADS = 64
NUM_KV_HEADS = 8
HEAD_SIZE = 32
"""The smallest that CPU attention takes."""
HIDDEN_SIZE = 64
VOCABULARY = 512
CONTEXT = 2048


def make_random_llama(directory: Path) -> Path:
    """float32, and weights large enough that every token depends on the whole prompt by more than rounding."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE * 7 // 2,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
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
        # 80 layers of attention would make the mean of the prompt out of everything, and repeat one token for ever.
        model.model.embed_tokens.weight.mul_(20)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.15)
    model.save_pretrained(directory)
    return directory
