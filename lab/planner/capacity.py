"""How many requests per second a worker takes within a pair of limits. Pure.

Prompts arrive as a Poisson process and take equal times: an M/D/1 queue, whose waiting times fall off exponentially;
P(W > t) is about rho exp(-2 t (1 - rho) / (rho s)), the heavy-traffic form (Kingman), with s the time of one prompt.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lab.planner.steps import Steps

MAX_LOAD = 0.95
MAX_SEQUENCES = 512
_CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, and what they may expect."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    attained: float = 0.9
    """Share of requests that must be within both."""

    @property
    def context_tokens(self) -> float:
        """Of a request in the middle of its output."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Capacity:
    """What one worker carries. `rate_per_s` is 0 if a single request is too much already."""

    rate_per_s: float
    sequences: float = 0
    """Decoded at once."""
    step_s: float = 0.0
    chunk_tokens: int = 0
    why_not: str = ""


def rate_within(service_s: float, limit_s: float, attained: float) -> float:
    """Highest rate of prompts that take `service_s` each, `attained` of which start their reply within `limit_s`."""
    slack_s = limit_s - service_s
    if slack_s < 0:
        return 0.0
    missed = 1 - attained
    low, high = 0.0, MAX_LOAD
    for _ in range(40):
        load = (low + high) / 2
        if _p_waits_longer(load, service_s, slack_s) <= missed:
            low = load
        else:
            high = load
    return low / service_s


def _p_waits_longer(load: float, service_s: float, than_s: float) -> float:
    return load * math.exp(-2 * than_s * (1 - load) / (load * service_s)) if load > 0 else 0.0


def prefill_capacity(steps: Steps, work: Workload) -> Capacity:
    """Of a worker that only computes prompts."""
    if steps.kv_tokens < work.prompt_tokens:
        return Capacity(0, why_not=_does_not_fit(steps, work.prompt_tokens))
    service_s = steps.prefill_s(work.prompt_tokens)
    rate = rate_within(service_s, work.ttft_s, work.attained)
    why_not = "" if rate else f"one prompt takes {service_s:.2f} s, more than the TTFT limit"
    return Capacity(rate, step_s=service_s, why_not=why_not)


def decode_capacity(steps: Steps, work: Workload) -> Capacity:
    """Of a worker that only generates: as many sequences as memory and the ITL limit allow."""
    fit = min(MAX_SEQUENCES, steps.kv_tokens / (work.prompt_tokens + work.output_tokens))
    if fit < 1:
        return Capacity(0, why_not=_does_not_fit(steps, work.prompt_tokens + work.output_tokens))
    sequences = _most(fit, lambda count: steps.step_s(count, work.context_tokens) <= work.itl_s)
    if sequences < 1:
        alone_s = steps.step_s(1, work.context_tokens)
        return Capacity(0, why_not=f"one step takes {alone_s * 1000:.1f} ms, more than the ITL limit")
    step_s = steps.step_s(sequences, work.context_tokens)
    # What comes varies: a worker filled to the brim would queue.
    return Capacity(MAX_LOAD * sequences / (step_s * work.output_tokens), sequences, step_s)


def colocated_capacity(steps: Steps, work: Workload) -> Capacity:
    """Of a worker that does both, with chunked prefill, at its best chunk size and number of sequences.

    Every step carries a chunk beside the decodes, so the gap between tokens is that of a mixed step.
    """
    fit = min(MAX_SEQUENCES, steps.kv_tokens / (work.prompt_tokens + work.output_tokens))
    if fit < 1:
        return Capacity(0, why_not=_does_not_fit(steps, work.prompt_tokens + work.output_tokens))
    options = [_with_chunk(steps, work, chunk, fit) for chunk in _CHUNKS]
    return max(options, key=lambda capacity: capacity.rate_per_s)


def _with_chunk(steps: Steps, work: Workload, chunk: int, fit: float) -> Capacity:
    chunk = min(chunk, work.prompt_tokens)

    def mixed_s(count: float) -> float:
        return steps.step_s(count, work.context_tokens, chunk, work.prompt_tokens // 2)

    most = _most(fit, lambda count: mixed_s(count) <= work.itl_s)
    if most < 1:
        return Capacity(0, why_not=f"a step of {chunk} prompt tokens takes longer than the ITL limit")
    best = Capacity(0, why_not="prompts take longer than the TTFT limit")
    for part in range(1, 11):
        sequences = most * part / 10
        step_s = mixed_s(sequences)
        service_s = step_s * work.prompt_tokens / chunk
        rate = min(
            rate_within(service_s, work.ttft_s, work.attained), MAX_LOAD * sequences / (step_s * work.output_tokens)
        )
        if rate > best.rate_per_s:
            best = Capacity(rate, sequences, step_s, chunk)
    return best


def _most(limit: float, holds: Callable[[float], bool]) -> float:
    """The largest count up to `limit` for which `holds`, which is monotonic; 0 if none."""
    if not holds(1):
        return 0.0
    low, high = 1.0, limit
    if holds(high):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _does_not_fit(steps: Steps, num_tokens: int) -> str:
    if not steps.kv_tokens:
        needed = steps.weights_per_gpu_bytes / 1e9
        return f"{needed:.0f} GB of weights per GPU leave no room in {steps.gpu.memory_bytes / 1e9:.0f} GB"
    return f"one request of {num_tokens} tokens does not fit into {steps.kv_tokens} tokens of KV"
