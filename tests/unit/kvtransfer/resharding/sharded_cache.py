"""Synthetic caches: the KV of one prompt, laid out over the ranks of a worker as different engines would."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import CacheMap, ModelFacts, probe
from kvtransfer.resharding.forms import CPU_PLANES, TOKEN_ROWS
from kvtransfer.resharding.heads import heads_of

Array = NDArray[Any]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", CPU_PLANES)
"""vLLM's names: the order in memory of layer, block, head, token (N) and content."""


@dataclass(frozen=True)
class Model:
    """Of one prompt, the KV is an array [layer, token, head, content], keys and values side by side in the content."""

    total_heads: int
    head_size: int
    num_layers: int = 2
    kv_dtype: str = "bfloat16"
    is_mla: bool = False

    @property
    def content(self) -> int:
        return self.head_size if self.is_mla else 2 * self.head_size

    def prompt(self, num_tokens: int, seed: int = 0) -> Array:
        dtype = np.uint8 if self.kv_dtype.startswith("fp8") else np.uint16
        shape = (self.num_layers, num_tokens, self.total_heads, self.content)
        # No zeros, so that what was never written can be told apart.
        return np.random.default_rng(seed).integers(1, np.iinfo(dtype).max, shape, dtype=dtype)

    def facts(self, tp_size: int, block_size: int, layout: str) -> ModelFacts:
        return ModelFacts(
            model="synthetic", dtype="bfloat16", kv_dtype=self.kv_dtype,
            num_kv_heads=max(1, self.total_heads // tp_size), head_size=self.head_size, block_size=block_size,
            layout_name=layout, attention_backend="CPU_ATTN" if layout == CPU_PLANES else "FLASH_ATTN",
            tp_size=tp_size, total_kv_heads=self.total_heads,
            content_format=CPU_PLANES if layout == CPU_PLANES else TOKEN_ROWS,
        )  # fmt: skip


LLAMA_70B = Model(total_heads=8, head_size=128)
MLA = Model(total_heads=1, head_size=576, is_mla=True)


class RankCache:
    """The empty cache of one rank, and what of a prompt it holds."""

    def __init__(
        self, model: Model, rank: int, tp_size: int, block_size: int, layout: str = "LBHNC", num_blocks: int = 12
    ) -> None:
        self.model, self.block_size, self.num_blocks = model, block_size, num_blocks
        self.heads = heads_of(rank, tp_size, model.total_heads)
        self._is_planes = layout == CPU_PLANES
        self.layers = self._views("LBHNC" if self._is_planes else layout)
        self.facts = model.facts(tp_size, block_size, layout)
        self.map: CacheMap = probe({f"layer.{i}": view for i, view in enumerate(self.layers)}, num_blocks, self.facts)

    def _views(self, layout: str) -> list[Array]:
        """Per layer [block, head, token, content] with the strides of that layout."""
        model = self.model
        sizes = {"L": model.num_layers, "B": self.num_blocks, "H": self.heads.count, "N": self.block_size,
                 "C": model.content}  # fmt: skip
        dtype = np.uint8 if model.kv_dtype.startswith("fp8") else np.uint16
        in_memory = np.zeros([sizes[axis] for axis in layout], dtype=dtype)
        return list(in_memory.transpose([layout.index(axis) for axis in "LBHNC"]))

    def write(self, prompt: Array, block_ids: list[int]) -> None:
        """Put this rank's heads of all tokens into the blocks, in token order."""
        self._walk(prompt, block_ids, to_cache=True)

    def read(self, block_ids: list[int], num_tokens: int) -> Array:
        """This rank's heads as they lie in the blocks: [layer, token, head, content]."""
        dtype = self.layers[0].dtype
        found = np.zeros((self.model.num_layers, num_tokens, self.model.total_heads, self.model.content), dtype=dtype)
        self._walk(found, block_ids, to_cache=False)
        return found[:, :, self.heads.first : self.heads.end]

    def expected(self, prompt: Array) -> Array:
        return prompt[:, :, self.heads.first : self.heads.end]

    def _walk(self, prompt: Array, block_ids: list[int], to_cache: bool) -> None:
        ours = slice(self.heads.first, self.heads.end)
        for layer in range(self.model.num_layers):
            for token in range(prompt.shape[1]):
                block, place = block_ids[token // self.block_size], token % self.block_size
                for where, part in self._places(self.layers[layer][block], place, prompt[layer, token, ours]):
                    if to_cache:
                        where[:] = part
                    else:
                        part[:] = where

    def _places(self, block: Array, place: int, content: Array) -> list[tuple[Array, Array]]:
        """Where the content of token `place` lies in a block [head, token, content]: (in the cache, of the content)."""
        if not self._is_planes:
            return [(block[:, place], content)]
        half = self.model.content // 2
        heads = self.heads.count
        keys, values = block.reshape(heads, 2, half * self.block_size).swapaxes(0, 1)
        return [
            (keys.reshape(heads, half, self.block_size)[:, :, place], content[:, :half]),
            (values.reshape(heads, self.block_size, half)[:, place], content[:, half:]),
        ]


def worker(model: Model, tp_size: int, block_size: int, layout: str = "LBHNC", num_blocks: int = 12) -> list[RankCache]:
    return [RankCache(model, rank, tp_size, block_size, layout, num_blocks) for rank in range(tp_size)]


def fp8(model: Model) -> Model:
    return replace(model, kv_dtype="fp8_e4m3")
