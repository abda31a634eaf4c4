"""What settings move, by the planner's arithmetic: no noise, any machine. Times are those of `twinpool plan`."""

import math
from dataclasses import replace

from lab.planner.gpus import GPUS
from lab.planner.models import MODELS
from lab.planner.steps import EXPECTED, Steps, transfer_s
from lab.tuning.markdown import count, gb, ms, table

GPU = GPUS["h100"]
SMALL, LARGE = MODELS["llama-3.1-8b"], MODELS["llama-3.1-70b"]
ON_ONE = Steps(SMALL, GPU, 1, efficiency=EXPECTED)
ON_FOUR = Steps(LARGE, GPU, 4, efficiency=EXPECTED)
PROMPT = 8000
"""Tokens of a long prompt, and of a stream's context, in all these tables."""


def memory_share() -> str:
    """`gpu_memory_utilization`: tokens that fit."""
    rows = []
    for share in (0.5, 0.7, 0.8, 0.9, 0.95):
        cells = [f"{share:g}"]
        for steps in (ON_ONE, ON_FOUR):
            tokens = replace(steps, memory_share=share).kv_tokens
            cells += [count(tokens), count(tokens // PROMPT)]
        rows.append(cells)
    heads = (
        "gpu_memory_utilization", "8B, 1 GPU: KV tokens", "streams of 8,000", "70B, 4 GPUs: KV tokens",
        "streams of 8,000",
    )  # fmt: skip
    return table(heads, rows)


def sequences() -> str:
    """`max_num_seqs`: what a decode step over so many takes."""
    rows = []
    for number in (1, 4, 16, 32, 48, 64):
        step_s = ON_FOUR.step_s(number, PROMPT)
        kv_bytes = number * PROMPT * ON_FOUR.kv_bytes_per_token
        fits = "" if number * PROMPT <= ON_FOUR.kv_tokens else " (more than there is)"
        rows.append([str(number), ms(step_s), count(number / step_s), gb(kv_bytes) + fits])
    return table(("streams at once", "gap between tokens, ms", "tokens/s of the worker", "KV per GPU, GB"), rows)


def chunks() -> str:
    """`max_num_batched_tokens`: one prompt alone, and what stands beside it."""
    rows = []
    for chunk in (256, 512, 1024, 2048, 4096, 8192):
        alone_s = ON_FOUR.prefill_s(PROMPT, chunk)
        step_s = ON_FOUR.step_s(0, 0, min(chunk, PROMPT), PROMPT // 2)
        mixed_s = ON_FOUR.step_s(32, PROMPT, min(chunk, PROMPT), PROMPT // 2)
        last = PROMPT % chunk or chunk
        left_s = transfer_s(ON_FOUR, ON_FOUR, min(last, PROMPT), same_machine=False)
        rows.append([str(chunk), ms(alone_s), ms(step_s), ms(mixed_s), ms(left_s)])
    heads = (
        "tokens per step", "TTFT of 8,000 tokens, ms", "an urgent prompt waits at most, ms",
        "gap of 32 streams on the same engine, ms", "left to move at the prefill's end, ms",
    )  # fmt: skip
    return table(heads, rows)


def ranks() -> str:
    """`tensor_parallel_size`: memory, steps, all-reduces and hand-overs of two models."""
    rows = []
    for base in (ON_ONE, ON_FOUR):
        for number in (1, 2, 4, 8):
            steps = replace(base, tensor_parallel=number)
            cells = [steps.model.name, str(number), gb(steps.weights_per_gpu_bytes)]
            if not steps.kv_tokens:
                rows.append([*cells, "does not fit", "-", "-", "-", "-"])
                continue
            together_s = steps.step_s(32, PROMPT)
            silent = replace(steps, gpu=replace(GPU, peer_bytes_per_s=math.inf), efficiency=_NO_LATENCY)
            moved_s = transfer_s(steps, steps, PROMPT, same_machine=False)
            times = (steps.prefill_s(PROMPT), together_s, together_s - silent.step_s(32, PROMPT), moved_s)
            rows.append([*cells, count(steps.kv_tokens), *map(ms, times)])
    heads = (
        "model", "ranks", "weights per GPU, GB", "KV tokens", "TTFT of 8,000 tokens, ms", "gap of 32 streams, ms",
        "of it all-reduces, ms", "8,000 tokens to another machine, ms",
    )  # fmt: skip
    return table(heads, rows)


_NO_LATENCY = replace(EXPECTED, allreduce_latency_s=0.0)


def kv_dtypes() -> str:
    """`kv_cache_dtype`: of the 70B model on four GPUs."""
    rows = []
    for name, size in (("auto (bf16)", 2), ("fp8", 1)):
        steps = replace(ON_FOUR, kv_bytes=size)
        rows.append(
            [
                name, f"{LARGE.kv_bytes_per_token(size) / 1024:.0f}", count(steps.kv_tokens),
                ms(steps.step_s(48, PROMPT)),
                ms(transfer_s(steps, steps, PROMPT, same_machine=True)),
                ms(transfer_s(steps, steps, PROMPT, same_machine=False)),
            ]
        )  # fmt: skip
    heads = (
        "kv_cache_dtype", "KiB per token", "KV tokens", "gap of 48 streams, ms", "8,000 tokens within a machine, ms",
        "to another one, ms",
    )  # fmt: skip
    return table(heads, rows)


def cached_prefix() -> str:
    """`enable_prefix_caching`: a prompt of which a part is there."""
    rows = []
    for share in (0, 0.5, 0.75, 0.9):
        cached = int(PROMPT * share)
        seconds = ON_FOUR.step_s(0, 0, PROMPT - cached, cached)
        moved = (PROMPT - cached) * LARGE.kv_bytes_per_token()
        rows.append([f"{share:.0%}".replace("%", " %"), ms(seconds), gb(moved)])
    return table(("of 8,000 tokens cached", "TTFT, ms", "KV to move if D has it too, GB"), rows)
