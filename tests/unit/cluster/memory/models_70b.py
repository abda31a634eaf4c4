"""Llama 3.1 70B as its `config.json` describes it, and machines it may run on."""

from typing import Any

from cluster.preflight.machine import Machine
from cluster.preflight.model_facts import ModelFacts, facts_of_config

WEIGHT_BYTES = 141_107_412_992
"""70,553,706,496 weights in bf16."""
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
FP8 = {
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}
}
H100_BYTES = 81_559 << 20
"""As nvidia-smi shows it."""


def llama_70b(**changes: Any) -> ModelFacts:
    return facts_of_config({**LLAMA_70B, **changes}, 0)


def h100s(count: int, memory_bytes: int = H100_BYTES) -> Machine:
    gpus = tuple(map(str, range(count)))
    return Machine(cores=(0, 1), memory_free_bytes=1 << 40, gpus=gpus, gpu_memory=dict.fromkeys(gpus, memory_bytes))
