"""How KV blocks of real models lie in memory. Pure arithmetic."""

from typing import Literal

import msgspec

MemoryOrder = Literal["LBHNC", "LBNHC"]
"""vLLM's names: layers apart, then of every block the heads (H) of each token (N), or the tokens of each head; C holds
K and V side by side."""


class BlockShape(msgspec.Struct, frozen=True):
    """One paged KV cache of a model on a single rank."""

    model: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    """Tokens per block."""
    order: MemoryOrder
    dtype_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        return self.num_layers * self.num_kv_heads * self.head_size * 2 * self.dtype_bytes

    @property
    def piece_bytes(self) -> int:
        """One block of one layer: the largest piece that is contiguous in memory."""
        return self.block_bytes // self.num_layers

    @property
    def block_bytes(self) -> int:
        """One block over all layers."""
        return self.token_bytes * self.block_size

    def num_blocks(self, max_bytes: int, divisor: int) -> int:
        """As many as fit into `max_bytes`, a multiple of `divisor`, and at least that many."""
        return max(divisor, max_bytes // self.block_bytes // divisor * divisor)


REAL_SHAPES = (
    # Block sizes and orders are vLLM's defaults: on CPUs for the smallest, on GPUs for the others.
    BlockShape("SmolLM2-135M", num_layers=30, num_kv_heads=3, head_size=64, block_size=128, order="LBHNC"),
    BlockShape("Llama-3.1-8B", num_layers=32, num_kv_heads=8, head_size=128, block_size=16, order="LBNHC"),
    BlockShape("Llama-3.1-70B", num_layers=80, num_kv_heads=8, head_size=128, block_size=16, order="LBNHC"),
)
