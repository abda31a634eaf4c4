"""LoRA adapters with random weights, in peft's format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.engine.random_llama import HEAD_SIZE, TINY

RANK = 4
SCALE = 0.15
"""Large enough that the adapter changes the very first token."""


def make_random_adapter(directory: Path, seed: int) -> Path:
    """For the query and value projections of every layer of the tiny `random_llama`."""
    random = torch.Generator().manual_seed(seed)
    widths = {"q_proj": TINY.hidden, "v_proj": TINY.kv_heads * HEAD_SIZE}
    tensors = {}
    for layer in range(TINY.layers):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, TINY.hidden, generator=random) * SCALE
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=random) * SCALE
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
        "target_modules": list(widths), "base_model_name_or_path": "random-llama",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
