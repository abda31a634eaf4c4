"""Prompts of every interesting length, and how their greedy tokens are asked for."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from tests.engine.servers import BLOCK, CHUNK, CONTEXT, MODEL_NAME


class TokenCase(msgspec.Struct, frozen=True):
    """A prompt of `num_tokens` tokens of the article `seed`."""

    num_tokens: int
    seed: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.num_tokens}-tokens"


class TokenReply(msgspec.Struct, frozen=True):
    """The answer to a token case."""

    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def _lengths() -> list[int]:
    edges = [1, *(n + d for n in (BLOCK, CHUNK, 2 * BLOCK, 2 * CHUNK, 4 * BLOCK) for d in (-1, 0, 1))]
    # 3 chunks end in the middle of a block; 6 chunks end with block 9; the last one fills the context to the brim.
    return [*edges, 2, 31, 64, 320, 3 * CHUNK, 3 * CHUNK + 1, 700, 6 * CHUNK, CONTEXT - 2]


TOKEN_CASES: list[TokenCase] = [
    TokenCase(num_tokens=n, seed=100 + n, max_tokens=min(24 if n in (320, 700) else 8, CONTEXT - n))
    for n in sorted(set(_lengths()))
]


CROWD: list[TokenCase] = [case for case in TOKEN_CASES if 64 <= case.num_tokens <= 257][:8]
"""Sent all at once. In a batch, rounding differs, so ties of two tokens may fall the other way."""


def margins(client: httpx.Client, prompt: Sequence[int], max_tokens: int) -> list[float]:
    """By how much (in log probability) each greedy token beat the next best."""
    body = {
        "model": MODEL_NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "logprobs": 2, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body).raise_for_status()
    ranked = [sorted(top.values()) for top in answer.json()["choices"][0]["logprobs"]["top_logprobs"]]
    return [values[-1] - values[-2] for values in ranked]


def generate(client: httpx.Client, prompt: Sequence[int], max_tokens: int, *, stream: bool) -> TokenReply:
    """Greedy tokens of one prompt. Raises on any error reply or event."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    if not stream:
        answer = client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return _token_reply([answer.json()])
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    if data[-1] != "[DONE]":
        raise ValueError(f"the stream ended with {data[-1]!r}, expected [DONE]")
    return _token_reply([json.loads(item) for item in data[:-1]])


def _token_reply(parts: list[dict[str, Any]]) -> TokenReply:
    choices = [choice for part in parts for choice in part["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    if len(reasons) != 1:
        raise ValueError(f"expected one finish reason, found {reasons}")
    usage = parts[-1]["usage"]
    return TokenReply(
        token_ids=[token for choice in choices for token in choice["token_ids"] or []],
        finish_reason=reasons[0],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )
