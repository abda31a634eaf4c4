"""Streams completions from a server and keeps the times at which tokens came."""

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

_FIRST_ID, _LAST_ID = 100, 40_000
"""Token ids that prompts are drawn from: no special tokens, and in the vocabulary of any model."""


@dataclass(frozen=True)
class TokenTimes:
    """When the chunks of one stream came, in seconds."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    """Between neighbouring chunks; `gaps_s[0]` is the one from the first token to the second."""

    @property
    def num_chunks(self) -> int:
        return 1 + len(self.gaps_s)


class StreamFailed(Exception):
    """The server answered with an error or fewer tokens than asked for."""


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Token ids that no cache has seen."""
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(num_tokens)]


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], max_tokens: int
) -> TokenTimes:
    """One greedy completion of exactly `max_tokens` tokens; raises `StreamFailed` if it is anything else."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    sent_s = time.perf_counter()
    times: list[float] = []
    num_tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise StreamFailed(f"{url} answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise StreamFailed(f"{url} broke the stream off: {event['error']}")
            num_tokens += sum(len(choice["token_ids"] or ()) for choice in event["choices"])
            times.append(time.perf_counter() - sent_s)
    if num_tokens != max_tokens:
        raise StreamFailed(f"{url} sent {num_tokens} tokens, {max_tokens} were asked for")
    return TokenTimes(times[0], tuple(later - earlier for earlier, later in itertools.pairwise(times)))


async def one_by_one(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float
) -> list[TokenTimes]:
    """Each prompt alone, one after the other."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        return [await stream(session, url, model, prompt, max_tokens) for prompt in prompts]


async def all_at_once(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float
) -> list[TokenTimes]:
    """All prompts at the same time."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), connector=connector) as session:
        return list(await asyncio.gather(*(stream(session, url, model, prompt, max_tokens) for prompt in prompts)))


def median_step_s(streams: Sequence[TokenTimes]) -> float:
    """The decode step: the median gap, without the first of each stream."""
    return statistics.median(gap for times in streams for gap in times.gaps_s[1:])
