"""Decides which prompts an engine's step works on, and how many tokens of each. No vLLM, no clock.

Prompts are worked on in order of urgency: priority first, then deadline. A step is as short as is economical: the most
urgent prompt gets all the tokens it can use; others ride along until the step has `fill_tokens`, from where on every
further token would delay the urgent prompt by as much as it helps somebody else. Prompts that get nothing step aside:
they keep their blocks and go on later where they stopped.

Nobody starves. A deadline that cannot be met any more slips, but only so far (`latest_s`), and later arrivals rank
behind it. And a prompt that still waits then always keeps a share of the step, also against an endless stream of
requests of better priority. Before that it gets none: whoever may still be in time must not make others late.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 4.0
"""Times its own prefill time that a prompt waits before it is owed a share, if its deadline is not later."""
PATIENCE_AT_LEAST_S = 1.0
SHARE = 8
"""The prompt that is owed one gets an eighth of each step's budget."""
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


def own_s(prefill: Prefill, token_s: float) -> float:
    """Seconds its whole prompt takes alone, at `token_s` seconds per token."""
    return prefill.tokens_total * token_s


def latest_s(prefill: Prefill, token_s: float) -> float:
    """The effective deadline never slips past this."""
    return max(prefill.deadline_s, prefill.arrival_s + PATIENCE * own_s(prefill, token_s))


def effective_deadline_s(prefill: Prefill, now_s: float, token_s: float) -> float:
    """Its deadline, or when it can be done at the earliest: who is late anyway does not make others late too."""
    earliest_end_s = now_s + prefill.tokens_left * token_s
    return min(max(prefill.deadline_s, earliest_end_s), latest_s(prefill, token_s))


def is_impatient(prefill: Prefill, now_s: float, token_s: float) -> bool:
    """It has waited out its patience, and its deadline is past."""
    return now_s >= max(latest_s(prefill, token_s), prefill.arrival_s + PATIENCE_AT_LEAST_S)


def by_urgency(prefills: Sequence[Prefill], now_s: float, token_s: float) -> list[Prefill]:
    """Most urgent first; the result does not depend on the order of `prefills`."""
    return sorted(
        prefills,
        key=lambda p: (
            not p.ahead,
            p.priority,
            effective_deadline_s(p, now_s, token_s),
            p.arrival_s,
            p.request_id,
        ),
    )


def owed_a_share(ranked: Sequence[Prefill], now_s: float, token_s: float) -> Prefill | None:
    """The one that waits longest of those whose patience is at its end, unless it is its turn anyway."""
    patient = [p for p in ranked if p.certain and is_impatient(p, now_s, token_s)]
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
