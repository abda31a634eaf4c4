"""What simulated workers cost: what a plan computes of a model and GPUs, or what was fitted to a measured run."""

from dataclasses import dataclass
from typing import Protocol

from lab.planner.plan import Asked
from lab.planner.steps import Steps, transfer_s
from proxy.scheduling.view import Role

_LONGEST_PROMPT = 131_072


class StepTimes(Protocol):
    """How long the steps of one engine take. Seconds."""

    @property
    def kv_tokens(self) -> int:
        """That its KV cache holds."""
        ...

    def step_s(self, decodes: float, context_tokens: float, prefill_tokens: float = 0, already: int = 0) -> float:
        """One step over `decodes` sequences of `context_tokens` each, and a chunk of a prompt behind `already`."""
        ...

    def prefill_s(self, num_tokens: int, chunk_tokens: int = 8192) -> float:
        """A prompt alone, chunk by chunk."""
        ...


class Costs(Protocol):
    """Of a whole cluster."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def first_token_s(self) -> float:
        """What a client waits for its first token beside queue and engine: HTTP, tokenizing, sockets."""
        ...

    def steps(self, role: Role) -> StepTimes: ...

    def transfer_s(self, num_tokens: int) -> float:
        """From the end of a prefill until the decode worker has the KV of the last chunk, of so many tokens."""
        ...


@dataclass(frozen=True)
class Pools:
    """How many workers of which size. Ranks per worker."""

    num_prefill: int
    prefill_tp: int
    num_decode: int
    decode_tp: int

    @property
    def num_gpus(self) -> int:
        return self.num_prefill * self.prefill_tp + self.num_decode * self.decode_tp


@dataclass(frozen=True)
class PlannedCosts:
    """By arithmetic, for GPUs that need not exist."""

    asked: Asked
    pools: Pools
    memory_share: float = 0.9
    """vLLM's `gpu_memory_utilization`."""
    first_token_s: float = 0.0

    @property
    def max_model_len(self) -> int:
        return self.asked.model.context

    def steps(self, role: Role) -> Steps:
        ranks = self.pools.prefill_tp if role == "prefill" else self.pools.decode_tp
        asked = self.asked
        return Steps(
            asked.model, asked.gpu, ranks, asked.weight_bytes, asked.kv_bytes, asked.efficiency, self.memory_share
        )

    def transfer_s(self, num_tokens: int) -> float:
        same_machine = self.pools.num_gpus <= self.asked.gpus_per_machine
        return transfer_s(self.steps("prefill"), self.steps("decode"), num_tokens, same_machine=same_machine)


@dataclass(frozen=True)
class FittedSteps:
    """A straight line through what was measured: every part is in seconds."""

    base_s: float
    """Of any step."""
    token_s: float
    """More per token of a prompt."""
    pair_s: float
    """More per pair of a prompt's token and one before it: the quadratic part."""
    sequence_s: float
    """More per sequence that decodes."""
    kv_token_s: float
    """More per token of their KV."""
    kv_tokens: int = 1_000_000

    def step_s(self, decodes: float, context_tokens: float, prefill_tokens: float = 0, already: int = 0) -> float:
        pairs = prefill_tokens * (already + prefill_tokens / 2)
        reading = self.kv_token_s * decodes * context_tokens
        return self.base_s + self.token_s * prefill_tokens + self.pair_s * pairs + self.sequence_s * decodes + reading

    def prefill_s(self, num_tokens: int, chunk_tokens: int = 8192) -> float:
        starts = range(0, num_tokens, chunk_tokens)
        return sum(self.step_s(0, 0, min(chunk_tokens, num_tokens - start), start) for start in starts)


@dataclass(frozen=True)
class FittedCosts:
    """By what clients saw of a run. All workers alike."""

    engine: FittedSteps
    first_token_s: float
    handover_s: float
    """Of any transfer; 0 where nothing is handed over."""
    max_model_len: int = _LONGEST_PROMPT

    def steps(self, _role: Role) -> FittedSteps:
        return self.engine

    def transfer_s(self, _num_tokens: int) -> float:
        return self.handover_s
