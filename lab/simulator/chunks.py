"""What goes into the next step of a simulated prefill worker: the rules of `prefill.chunk_order` and `step_budget`."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from lab.simulator.costs import StepTimes
from lab.simulator.request import Request

FIXED_PART = 0.1
"""Part of an economical step's time that every step costs."""
FIXED_PART_AT_MOST = 0.25
"""The part that is not exceeded for the sake of those who may come."""
HOLD_UP = 0.25
"""Part of the time that prompts can spare which may go to those that ride along."""
YIELDING = 1.25
"""Times as long a prompt may take in short steps, and still must be in time."""


@dataclass(slots=True, eq=False)
class Job:
    """A prompt of which tokens are left to compute."""

    request: Request
    tokens_left: int
    already: int
    """Tokens before those: computed or cached."""
    deadline_s: float = inf
    """For its first token."""

    @property
    def urgency(self) -> tuple[int, float, str]:
        """Lower goes first."""
        return (self.request.shape.standing.priority, self.deadline_s, self.request.request_id)


def next_chunk(ranked: Sequence[Job], steps: StepTimes, chunk_tokens: int, now_s: float) -> list[tuple[Job, int]]:
    """Jobs of the next step and their tokens; the most urgent job comes first in `ranked`, of at least one."""
    first, budget = ranked[0], chunk_tokens
    longest_s = first.request.shape.standing.slo.longest_step_s
    if len(ranked) == 1 and longest_s == inf:
        return share(ranked, budget)
    fixed_s = steps.step_s(0, 0, 1)
    token_s = max(1e-9, (steps.step_s(0, 0, chunk_tokens) - fixed_s) / chunk_tokens)
    if longest_s < inf and now_s + YIELDING * (_left_s(first, steps) - fixed_s) <= first.deadline_s:
        within = bisect_right(range(1, budget + 1), longest_s, key=lambda n: steps.step_s(0, 0, n, first.already))
        budget = min(budget, max(1, within, _economical(fixed_s, token_s, FIXED_PART_AT_MOST)))
    held_up_s = HOLD_UP * _spare_s(ranked, steps, fixed_s, now_s)
    others = budget if held_up_s == inf else int(held_up_s / token_s)
    return share(ranked, budget, min(_economical(fixed_s, token_s, FIXED_PART), first.tokens_left + others))


def share(jobs: Iterable[Job], budget_tokens: int, fill_tokens: int | None = None) -> list[tuple[Job, int]]:
    """What of each prompt goes into a step: all of the first one that the budget allows, and of others until the step
    has `fill_tokens` (None: the budget)."""
    parts, used, most = [], 0, budget_tokens
    for job in jobs:
        if used >= most:
            break
        tokens = min(most - used, job.tokens_left)
        parts.append((job, tokens))
        used += tokens
        if fill_tokens is not None:
            most = min(budget_tokens, fill_tokens)
    return parts


def together(parts: Sequence[tuple[Job, int]]) -> tuple[int, int]:
    """(tokens, tokens before them) of one chunk that costs as much as all of these.

    Prompts do not attend to each other: as many pairs of tokens as all of them have, not as one long one.
    """
    tokens = sum(part for _, part in parts)
    pairs = sum(part * (job.already + part / 2) for job, part in parts)
    return tokens, round(pairs / tokens - tokens / 2) if tokens else 0


def _economical(fixed_s: float, token_s: float, fixed_part: float) -> int:
    """Tokens with which what every step costs is that part of its time."""
    return int(fixed_s * (1 - fixed_part) / fixed_part / token_s)


def _spare_s(ranked: Sequence[Job], steps: StepTimes, fixed_s: float, now_s: float) -> float:
    """How long everybody who can be in time, in this order, may be held up and still is; endless if nobody can."""
    spare_s, ends_s = inf, now_s
    for job in ranked:
        ends_s += _left_s(job, steps) - fixed_s
        if ends_s <= job.deadline_s:
            spare_s = min(spare_s, job.deadline_s - ends_s)
    return spare_s


def _left_s(job: Job, steps: StepTimes) -> float:
    return steps.step_s(0, 0, job.tokens_left, job.already)
