"""Turns a GGUF file into a Hugging Face directory with bfloat16 weights and a tokenizer.

Run as a process of its own, `python -m cluster.preflight.convert_gguf FILE.gguf DIRECTORY`, so that it can be
stopped at once and its memory is gone when it ends.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, directory: Path) -> None:
    """Writes config.json, model.safetensors, the tokenizer and the chat template into `directory`."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
