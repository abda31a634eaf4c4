"""How long a simulated engine takes. Pure; the same numbers for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import SimulationConfig


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence in one step."""

    num_tokens: int
    num_before: int
    """Tokens of the sequence that were computed earlier, to which these attend."""


class CostModel:
    """Seconds of steps and transfers of one worker."""

    def __init__(self, config: SimulationConfig, worker_id: str) -> None:
        self._config = config
        self._random = random.Random(f"{config.seed} {worker_id}")

    def step_s(self, chunks: Sequence[Chunk], num_decoding: int, num_kv_tokens: int) -> float:
        """One step that computes these chunks and one token each of `num_decoding` sequences with so much KV."""
        config = self._config
        seconds = 0.0
        if chunks:
            pairs = sum(chunk.num_tokens * (chunk.num_before + chunk.num_tokens / 2) for chunk in chunks)
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            seconds += config.chunk_s + num_tokens / config.prefill_tokens_per_s + config.attention_s_per_pair * pairs
        if num_decoding:
            seconds += config.decode_step_s
            seconds += config.decode_s_per_sequence * num_decoding + config.decode_s_per_kv_token * num_kv_tokens
        return self._real(seconds)

    def transfer_s(self, num_bytes: int) -> float:
        """Moving so many bytes to a decode worker."""
        return self._real(num_bytes / (self._config.transfer_gb_per_s * 1e9))

    def _real(self, seconds: float) -> float:
        if self._config.speed == "instant":
            return 0.0
        jitter = self._config.jitter
        factor = self._random.uniform(1 - jitter, 1 + jitter) if jitter else 1.0
        return seconds * factor / self._config.time_scale
