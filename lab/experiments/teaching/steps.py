"""Three ways to generate with plain transformers. Each records the shape of every step that it computes.

* `sequential`: one request at a time, with `generate` and its KV cache.
* `static`: four requests that wait for each other, padded to equal length, and leave together.
* `uncached`: one request at a time, the whole prompt computed again for every token.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from lab.experiments.results import StepShape

Way = Literal["sequential", "static", "uncached"]
STATIC_BATCH = 4
BATCH_WAIT_S = 1.0
"""A static batch starts when it is full, or when its first request has waited so long."""
_PAD = 0


class Model(Protocol):
    """What transformers' causal models are, as far as this goes."""

    def __call__(self, **inputs: Any) -> Any: ...


@dataclass
class Job:
    """One request. `emit` gets each token as it may leave, then None."""

    prompt: list[int]
    max_tokens: int
    emit: Callable[[int | None], None]
    is_gone: Callable[[], bool] = lambda: False
    """The client left."""


@dataclass
class Steps:
    """What was computed, in order."""

    shapes: list[StepShape] = field(default_factory=list)
    num_waiting: Callable[[], int] = lambda: 0

    def note(self, sequences: int, tokens: int) -> None:
        self.shapes.append(StepShape(time.monotonic(), sequences, tokens, self.num_waiting()))


def work(way: Way, model: Model, jobs: "queue.Queue[Job | None]", steps: Steps) -> None:
    """Serves jobs until None comes."""
    with torch.inference_mode():
        while (job := jobs.get()) is not None:
            if way == "static":
                batch, ended = _fill(job, jobs)
                _static(model, batch, steps)
                if ended:
                    return
            elif way == "sequential":
                _cached(model, job, steps)
            else:
                _uncached(model, job, steps)


def _fill(first: Job, jobs: "queue.Queue[Job | None]") -> tuple[list[Job], bool]:
    batch = [first]
    until_s = time.monotonic() + BATCH_WAIT_S
    while len(batch) < STATIC_BATCH:
        try:
            job = jobs.get(timeout=max(0.001, until_s - time.monotonic()))
        except queue.Empty:
            break
        if job is None:
            return batch, True
        batch.append(job)
    return batch, False


def _cached(model: Model, job: Job, steps: Steps) -> None:
    tokens = torch.tensor([job.prompt])
    cache = None
    for _ in range(job.max_tokens):
        if job.is_gone():
            break
        steps.note(1, tokens.shape[1])
        answer = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = answer.past_key_values
        tokens = answer.logits[:, -1].argmax(-1, keepdim=True)
        job.emit(int(tokens))
    job.emit(None)


def _uncached(model: Model, job: Job, steps: Steps) -> None:
    tokens = list(job.prompt)
    for _ in range(job.max_tokens):
        if job.is_gone():
            break
        steps.note(1, len(tokens))
        answer = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
        tokens.append(int(answer.logits[0, -1].argmax()))
        job.emit(tokens[-1])
    job.emit(None)


def _static(model: Model, batch: Sequence[Job], steps: Steps) -> None:
    """Padded on the left, so that all rows end where generation begins. Rows that are done are computed on."""
    longest = max(len(job.prompt) for job in batch)
    tokens = torch.tensor([[_PAD] * (longest - len(job.prompt)) + job.prompt for job in batch])
    mask = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = None
    replies: list[list[int]] = [[] for _ in batch]
    for _ in range(max(job.max_tokens for job in batch)):
        steps.note(len(batch), tokens.numel())
        answer = model(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache = answer.past_key_values
        tokens = answer.logits[:, -1].argmax(-1, keepdim=True)
        for reply, token in zip(replies, tokens[:, 0].tolist(), strict=True):
            reply.append(token)
        mask = torch.cat([mask, torch.ones(len(batch), 1, dtype=mask.dtype)], dim=1)
        places = places[:, -1:] + 1
    for job, reply in zip(batch, replies, strict=True):
        for token in reply[: job.max_tokens]:
            job.emit(token)
        job.emit(None)
