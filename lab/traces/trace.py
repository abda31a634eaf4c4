"""A trace: when requests came, how long they were, and what of their prompts they shared. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TraceRequest:
    """One request. Lengths in tokens."""

    at_s: float
    """From the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Of the prompt's blocks in order, where the trace tells: equal ids hold equal text. The last may be shorter."""
    block_tokens: int = 0


@dataclass(frozen=True)
class Scaling:
    """How a trace is made to suit a cluster. All 1 and no bounds: as it is."""

    speed: float = 1.0
    """2: the same requests in half of the time."""
    share: float = 1.0
    """Of requests kept, chosen by the seed: a lower rate without a different rhythm."""
    lengths: float = 1.0
    """Of prompts, blocks and outputs."""
    seconds: float = 0.0
    """Only those that come before, after the speed; 0: all."""
    max_prompt_tokens: int = 0
    """Longer ones are left out; 0: none."""


def scale(trace: Sequence[TraceRequest], scaling: Scaling, seed: int = 0) -> list[TraceRequest]:
    """In order. Every length stays at least 1; what a prompt shares is scaled with it."""
    rng = random.Random(seed)
    kept = [request for request in trace if scaling.share >= 1 or rng.random() < scaling.share]
    scaled = [
        replace(
            request,
            at_s=request.at_s / scaling.speed,
            prompt_tokens=max(1, round(request.prompt_tokens * scaling.lengths)),
            output_tokens=max(1, round(request.output_tokens * scaling.lengths)),
            block_tokens=max(1, round(request.block_tokens * scaling.lengths)) if request.block_tokens else 0,
        )
        for request in kept
    ]
    return [
        request
        for request in scaled
        if (not scaling.seconds or request.at_s < scaling.seconds)
        and (not scaling.max_prompt_tokens or request.prompt_tokens <= scaling.max_prompt_tokens)
    ]


def block_hit_rate(trace: Sequence[TraceRequest]) -> float:
    """Of all blocks, those that an earlier request had: what one cache without bounds would find."""
    seen: set[int] = set()
    hits = total = 0
    for request in trace:
        # A prefix cache finds a block only behind the ones before it.
        found = 0
        for block_id in request.block_ids:
            if block_id not in seen:
                break
            found += 1
        hits += found
        total += len(request.block_ids)
        seen.update(request.block_ids)
    return hits / total if total else 0.0
