"""Decides which prompts an engine's step works on, and how many tokens of each. No vLLM, no clock.

Prompts are worked on in order of urgency: priority first, then deadline. A step is as short as is economical: the most
urgent prompt gets all the tokens it can use; others ride along until the step has `fill_tokens`, as far as that makes
nobody late. Prompts that get nothing step aside: they keep their blocks and go on later where they stopped. Nobody
interrupts a step, so a prompt that has time is worked on in steps after which those of stricter classes, if any come,
can still be in time.

Nobody starves. A deadline that cannot be met any more slips, but only so far (`latest_s`), and later arrivals rank
behind it. And a prompt that still waits then always keeps a share of the step, also against an endless stream of
requests of better priority. Before that it gets none: whoever may still be in time must not make others late.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

PromptTime = Callable[[int, int], float]
"""Seconds of computing: tokens of a prompt, and tokens of it before them."""
PATIENCE = 4.0
"""Times its own prefill time that a prompt waits before it is owed a share, if its deadline is not later."""
PATIENCE_AT_LEAST_S = 1.0
SHARE = 8
"""The prompt that is owed one gets an eighth of each step's budget."""
HOLD_UP = 0.25
"""Part of the time that prompts can spare which may go to those that ride along: more may come that need it."""
YIELDING = 1.25
"""Times as long a prompt may take in short steps, and still must be in time."""
MIN_CHUNK_TOKENS = 16
"""A smaller chunk is only given to a prompt that ends with it."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of which tokens are left to compute."""

    request_id: str
    arrival_s: float
    """At the engine; this and all other times are of one monotonic clock."""
    deadline_s: float
    """For the first token."""
    priority: int
    """Lower goes first."""
    tokens_left: int
    """To compute, at least 1; cached ones do not count."""
    tokens_total: int
    """At arrival."""
    ahead: bool = False
    """The engine takes it before anybody else: it holds blocks while it waits, or has produced tokens before."""
    certain: bool = True
    """The engine will run it if it is given tokens. Others only get what nobody else can use."""
    longest_step_s: float = inf
    """A step that works on it first should end within this; whoever comes meanwhile may be in more of a hurry."""

    @property
    def before(self) -> int:
        """Tokens of it that are computed or cached."""
        return max(0, self.tokens_total - self.tokens_left)


def own_s(prefill: Prefill, takes_s: PromptTime) -> float:
    """Seconds its whole prompt takes alone."""
    return takes_s(prefill.tokens_total, 0)


def left_s(prefill: Prefill, takes_s: PromptTime) -> float:
    """The same of what is left of it."""
    return takes_s(prefill.tokens_left, prefill.before)


def latest_s(prefill: Prefill, takes_s: PromptTime) -> float:
    """The effective deadline never slips past this."""
    return max(prefill.deadline_s, prefill.arrival_s + PATIENCE * own_s(prefill, takes_s))


def effective_deadline_s(prefill: Prefill, now_s: float, takes_s: PromptTime) -> float:
    """Its deadline, or when it can be done at the earliest: who is late anyway does not make others late too."""
    earliest_end_s = now_s + left_s(prefill, takes_s)
    return min(max(prefill.deadline_s, earliest_end_s), latest_s(prefill, takes_s))


def is_impatient(prefill: Prefill, now_s: float, takes_s: PromptTime) -> bool:
    """It has waited out its patience, and its deadline is past."""
    return now_s >= max(latest_s(prefill, takes_s), prefill.arrival_s + PATIENCE_AT_LEAST_S)


def step_s(ranked: Sequence[Prefill], now_s: float, takes_s: PromptTime) -> float:
    """How long the step may take for the sake of those who come while it runs.

    Shorter steps make a prompt take a little longer, so one that would be late is not held to them.
    """
    first = ranked[0]
    has_time = now_s + YIELDING * left_s(first, takes_s) <= first.deadline_s
    return first.longest_step_s if has_time else inf


def held_up_s(ranked: Sequence[Prefill], now_s: float, takes_s: PromptTime) -> float:
    """How long others may hold up a step on the first prompt.

    That is part of the time that remains until one of those who can be in time, in this order, is late. Endless if
    nobody can: then it only matters how much is done.
    """
    spare_s, ends_s = inf, now_s
    for prefill in ranked:
        ends_s += left_s(prefill, takes_s)
        if ends_s <= prefill.deadline_s:
            spare_s = min(spare_s, prefill.deadline_s - ends_s)
    return HOLD_UP * spare_s


def by_urgency(prefills: Sequence[Prefill], now_s: float, takes_s: PromptTime) -> list[Prefill]:
    """Most urgent first; the result does not depend on the order of `prefills`."""
    return sorted(
        prefills,
        key=lambda p: (
            not p.ahead,
            p.priority,
            effective_deadline_s(p, now_s, takes_s),
            p.arrival_s,
            p.request_id,
        ),
    )


def owed_a_share(ranked: Sequence[Prefill], now_s: float, takes_s: PromptTime) -> Prefill | None:
    """The one that waits longest of those whose patience is at its end, unless it is its turn anyway."""
    patient = [p for p in ranked if p.certain and is_impatient(p, now_s, takes_s)]
    if not patient:
        return None
    oldest = min(patient, key=lambda p: (p.arrival_s, p.request_id))
    return None if oldest is ranked[0] else oldest


def share_out(
    ranked: Sequence[Prefill], budget_tokens: int, fill_tokens: int, owed: Prefill | None = None
) -> dict[str, int]:
    """Tokens of this step by request id, for those who get any; their sum is at most `budget_tokens`.

    `ranked` is in order of urgency; `owed` is one of them that gets a share although it is not its turn. While anybody
    has tokens left, the step gets as many as can be used, up to `fill_tokens` (less than `MIN_CHUNK_TOKENS` may be
    missing).
    """
    shares: dict[str, int] = {}
    left = budget_tokens
    if owed is not None and left > 1:
        shares[owed.request_id] = min(owed.tokens_left, left // 2, max(MIN_CHUNK_TOKENS, left // SHARE))
        left -= shares[owed.request_id]
    used = 0
    for prefill in [p for p in ranked if p.certain] + [p for p in ranked if not p.certain]:
        already = shares.get(prefill.request_id, 0)
        wanted = prefill.tokens_left - already
        tokens = min(wanted, left if used == 0 else min(left, fill_tokens - used))
        if tokens <= 0 or (used > 0 and tokens < min(MIN_CHUNK_TOKENS, wanted)):
            continue
        shares[prefill.request_id] = already + tokens
        used += tokens
        left -= tokens
    return shares
