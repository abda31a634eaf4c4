"""How long engine steps take: bounds from FLOP/s and bandwidth, and expectations from what is reached of them. Pure."""

from dataclasses import dataclass
from functools import cached_property

from cluster.preflight.memory.model_shape import ModelShape
from cluster.preflight.memory.rank_memory import EXPECTED_ACTIVATION_BYTES, RankMemory
from lab.planner.gpus import Gpu


@dataclass(frozen=True)
class Efficiency:
    """What real kernels reach of a data sheet. 1 everywhere gives lower bounds."""

    compute: float = 0.55
    """Of peak FLOP/s, in steps of thousands of tokens."""
    half_at_tokens: float = 128
    """Kernels reach half of that in steps of so many tokens."""
    memory: float = 0.75
    """Of memory bandwidth, in decode steps."""
    links: float = 0.7
    """Of links between GPUs."""
    step_overhead_s: float = 1e-3
    """Per engine step: scheduling, launching, sampling."""
    allreduce_latency_s: float = 10e-6
    """Of one all-reduce, apart from its bytes."""

    def of_compute(self, num_tokens: float) -> float:
        """What a step over so many tokens reaches of peak FLOP/s."""
        return self.compute * num_tokens / (num_tokens + self.half_at_tokens)


EXPECTED = Efficiency()
BOUNDS = Efficiency(compute=1, half_at_tokens=0, memory=1, links=1, step_overhead_s=0, allreduce_latency_s=0)


@dataclass(frozen=True)
class Steps:
    """A model on some GPUs that work as one (tensor parallel)."""

    model: ModelShape
    gpu: Gpu
    tensor_parallel: int
    weight_bytes: float = 2
    """Per weight: 2 for bf16, 1 for fp8."""
    kv_bytes: float = 2
    """Per element of the KV cache."""
    efficiency: Efficiency = BOUNDS
    memory_share: float = 0.9
    """vLLM's `gpu_memory_utilization`."""
    activation_bytes: float = EXPECTED_ACTIVATION_BYTES

    @property
    def weights_per_gpu_bytes(self) -> float:
        return self.model.bytes_of_weights(self.weight_bytes) / self.tensor_parallel

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Per GPU."""
        return self.model.kv_bytes_per_token(self.kv_bytes, self.tensor_parallel)

    @property
    def memory(self) -> RankMemory:
        """Of one GPU."""
        return RankMemory(
            device_bytes=self.gpu.memory_bytes,
            share=self.memory_share,
            weights_bytes=self.weights_per_gpu_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            activation_bytes=self.activation_bytes,
        )

    @property
    def kv_tokens(self) -> int:
        """That fit beside the weights; 0 if not even these do."""
        return self.memory.kv_tokens

    def step_s(self, decodes: float, context_tokens: float, prefill_tokens: float = 0, already: int = 0) -> float:
        """One engine step over `decodes` sequences of `context_tokens` each and one chunk of a prompt.

        Of the matrix products the slower of computing and of reading weights (roofline); then attention, which reads
        the cache in kernels of its own; then the all-reduces.
        """
        tokens = decodes + prefill_tokens
        peak = self.gpu.flop_per_s(self.weight_bytes) * self.tensor_parallel * self.efficiency.of_compute(tokens)
        reading = self.gpu.memory_bytes_per_s * self.efficiency.memory
        weights = self.model.weights_read(tokens) * self.weight_bytes / self.tensor_parallel
        layers_s = max(2 * self.model.active_weights * tokens / peak, weights / reading)
        attention_s = (decodes * context_tokens + already) * self.kv_bytes_per_token / reading
        attention_s += self.model.attention_flop(prefill_tokens, already) / peak
        return layers_s + attention_s + self._communication_s(tokens) + self.efficiency.step_overhead_s

    def prefill_s(self, num_tokens: int, chunk_tokens: int = 8192) -> float:
        """A prompt alone, chunk by chunk."""
        starts = range(0, num_tokens, chunk_tokens)
        return sum(self.step_s(0, 0, min(chunk_tokens, num_tokens - start), start) for start in starts)

    def _communication_s(self, num_tokens: float) -> float:
        """Two all-reduces per layer; a ring moves 2 (n-1)/n of the bytes through each GPU's link."""
        if (ranks := self.tensor_parallel) == 1:
            return 0.0
        payload = num_tokens * self.model.hidden * 2
        one_s = 2 * (ranks - 1) / ranks * payload / (self.gpu.peer_bytes_per_s * self.efficiency.links)
        return 2 * self.model.layers * (one_s + self.efficiency.allreduce_latency_s)


def transfer_s(prefill: Steps, decode: Steps, num_tokens: int, *, same_machine: bool) -> float:
    """KV of so many tokens from one worker to the other, all ranks at once over what connects them."""
    gpu = prefill.gpu
    link = gpu.peer_bytes_per_s if same_machine else gpu.network_bytes_per_s
    pairs = min(prefill.tensor_parallel, decode.tensor_parallel)
    moved = prefill.model.kv_bytes_per_token(prefill.kv_bytes) * num_tokens
    return moved / (link * prefill.efficiency.links * pairs)
