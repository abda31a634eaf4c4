"""The three teaching ways against a model of a few numbers: the next token follows from all tokens and their places."""

import queue
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from lab.experiments.teaching.steps import Job, Steps, Way, work

VOCABULARY = 50


class FakeModel:
    """Its cache is the tokens so far; padding is masked."""

    def __call__(self, **inputs: Any) -> Any:
        tokens = inputs["input_ids"]
        before = inputs.get("past_key_values")
        seen = torch.cat([before, tokens], dim=1) if before is not None else tokens
        mask = inputs.get("attention_mask", torch.ones_like(seen))
        assert mask.shape == seen.shape
        places = mask.cumsum(1)
        if inputs.get("position_ids") is not None:
            assert torch.equal(inputs["position_ids"], (places - 1).clamp(min=0)[:, -tokens.shape[1] :])
        following = (seen * mask * places).sum(1) % VOCABULARY
        logits = torch.nn.functional.one_hot(following, VOCABULARY).float()[:, None]
        return SimpleNamespace(logits=logits, past_key_values=seen)


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sum(token * (place + 1) for place, token in enumerate(tokens)) % VOCABULARY)
    return tokens[len(prompt) :]


def serve(way: Way, requests: list[tuple[list[int], int]]) -> tuple[list[list[int | None]], Steps]:
    jobs: queue.Queue[Job | None] = queue.Queue()
    replies: list[list[int | None]] = []
    for prompt, max_tokens in requests:
        reply: list[int | None] = []
        replies.append(reply)
        jobs.put(Job(prompt, max_tokens, reply.append))
    jobs.put(None)
    steps = Steps(num_waiting=jobs.qsize)
    work(way, FakeModel(), jobs, steps)
    return replies, steps


@pytest.mark.parametrize("way", get_args(Way))
def test_every_way_gives_each_request_the_tokens_it_would_get_alone(way: Way) -> None:
    requests = [([3, 1, 4], 4), ([1, 5, 9, 2, 6], 2), ([5], 3), ([8, 9], 1), ([7, 9, 3], 2)]
    replies, _ = serve(way, requests)
    assert replies == [[*alone(prompt, max_tokens), None] for prompt, max_tokens in requests]


def test_the_shapes_of_the_steps_show_what_each_way_wastes() -> None:
    requests = [([1] * 8, 3), ([2] * 4, 1)]
    shapes = {way: [(s.sequences, s.tokens) for s in serve(way, requests)[1].shapes] for way in get_args(Way)}
    assert shapes["uncached"] == [(1, 8), (1, 9), (1, 10), (1, 4)]
    assert shapes["sequential"] == [(1, 8), (1, 1), (1, 1), (1, 4)]
    assert shapes["static"] == [(2, 16), (2, 2), (2, 2)]  # the short one is padded, and computed on


def test_nobody_computes_for_a_client_that_left() -> None:
    jobs: queue.Queue[Job | None] = queue.Queue()
    reply: list[int | None] = []
    jobs.put(Job([1, 2], 5, reply.append, is_gone=lambda: True))
    jobs.put(None)
    steps = Steps()
    work("sequential", FakeModel(), jobs, steps)
    assert (reply, steps.shapes) == ([None], [])
