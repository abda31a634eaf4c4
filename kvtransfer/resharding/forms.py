"""The form of a rank's cache, as ranks tell it each other: enough to cut both caches into the same pieces."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN_ROWS = "token rows"
"""The content of a token of a head is one run of bytes, wherever the strides put it."""
CPU_PLANES = "cpu planes"
"""vLLM's CPU attention without tile registers: for each head all keys, [content, token], then all values, [token,
content], though the registered tensor looks like token rows."""

CUTTABLE_FORMATS = frozenset({TOKEN_ROWS, CPU_PLANES})
"""Those of which a block can be cut between tokens. In any other, nothing is known of a block but its heads."""


@dataclass(frozen=True)
class LayerForm:
    """How [block, head, token, content] lies in memory. All sizes in bytes; the content of a token is contiguous."""

    block_stride: int
    head_stride: int
    token_stride: int
    content: int
    element: int

    def memory_order(self, num_heads: int, num_tokens: int) -> str:
        """The axes inside a block that have more than one entry, outermost first."""
        axes = [("head", num_heads, self.head_stride), ("token", num_tokens, self.token_stride)]
        axes = sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: -axis[2])
        return ", ".join([*(name for name, _, _ in axes), "content"])


@dataclass(frozen=True)
class CacheForm:
    """All layers of one rank; ranks of one worker have equal forms."""

    tp_size: int
    total_kv_heads: int
    num_kv_heads: int
    """Of each rank."""
    block_size: int
    """Tokens per block."""
    content_format: str
    layers: tuple[tuple[int, LayerForm], ...]
    """Runs of equal layers: how many, and their form."""

    @property
    def num_layers(self) -> int:
        return sum(count for count, _ in self.layers)

    @property
    def memory_orders(self) -> set[str]:
        return {form.memory_order(self.num_kv_heads, self.block_size) for _, form in self.layers}

    def each_layer(self) -> Iterator[LayerForm]:
        for count, form in self.layers:
            yield from itertools.repeat(form, count)
