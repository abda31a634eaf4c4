"""Caches of a model's real shapes on a GPU, with contents that another process can compute.

Llama 8B in half precision: 32 layers, per block of 16 tokens 8 KV heads of 128 for K and for V; one block is 2 MiB.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import ModelFacts

NUM_LAYERS = 32
NUM_BLOCKS = 160
BLOCK_SIZE = 16
SHAPE = (2, 8, BLOCK_SIZE, 128)  # [K or V, kv head, token, content]
PROMPT_HASH = b"hash of the prompt"

FACTS = ModelFacts(
    model="llama-8b", dtype="float16", kv_dtype="float16", num_kv_heads=8, head_size=128, block_size=BLOCK_SIZE,
    layout_name="any", attention_backend="any", tp_size=1,
)  # fmt: skip


def make_cache(cupy: Any, device: int, is_apart: bool) -> dict[str, Any]:
    """Zeros. Logically [block, K or V, kv head, token, content]; `is_apart`: all K before all V, two runs a block."""
    cache = {}
    with cupy.cuda.Device(device):
        for layer in range(NUM_LAYERS):
            if is_apart:
                array = cupy.zeros((2, NUM_BLOCKS, *SHAPE[1:]), dtype=np.float16).transpose(1, 0, 2, 3, 4)
            else:
                array = cupy.zeros((NUM_BLOCKS, *SHAPE), dtype=np.float16)
            cache[f"layers.{layer}.attention"] = array
        cupy.cuda.Device(device).synchronize()
    return cache


def contents(layer: int, block_ids: list[int]) -> NDArray[np.float16]:
    """What an exporter has there: [block, K or V, kv head, token, content]. Whole numbers below 2048 are exact."""
    inner = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    blocks = np.array(block_ids).reshape(-1, 1, 1, 1, 1)
    numbers: NDArray[np.float16] = ((inner * 3 + blocks * 131 + layer * 17) % 2039).astype(np.float16)
    return numbers


def fill(cupy: Any, cache: dict[str, Any]) -> None:
    for layer, array in enumerate(cache.values()):
        array[...] = cupy.asarray(contents(layer, list(range(NUM_BLOCKS))))
    cupy.cuda.runtime.deviceSynchronize()
