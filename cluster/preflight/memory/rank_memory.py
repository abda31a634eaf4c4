"""How much of a device's memory is left for the KV cache. Pure. All sizes in bytes."""

from dataclasses import dataclass

EXPECTED_ACTIVATION_BYTES = 3e9
"""Per GPU: activations of a step of thousands of tokens, CUDA graphs, workspaces, NCCL."""


@dataclass(frozen=True)
class RankMemory:
    """One rank on its device."""

    device_bytes: float
    share: float
    """Of the device that the rank may use: vLLM's `gpu_memory_utilization`."""
    weights_bytes: float
    """Of this rank."""
    kv_bytes_per_token: float
    """Of this rank."""
    activation_bytes: float = 0.0
    """0 gives an upper bound of the room."""

    @property
    def usable_bytes(self) -> float:
        return self.device_bytes * self.share

    @property
    def kv_bytes(self) -> float:
        """Room for the KV cache; 0 if not even the weights fit."""
        return max(0.0, self.usable_bytes - self.weights_bytes - self.activation_bytes)

    @property
    def kv_tokens(self) -> int:
        """That the room holds."""
        return int(self.kv_bytes / self.kv_bytes_per_token)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that a cache needs for one request of so many tokens: vLLM keeps block 0 for itself."""
    return -(-num_tokens // block_size) + 1
