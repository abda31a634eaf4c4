"""How many prompt tokens a step may hold, by what steps cost. No vLLM, no clock.

`before` counts the tokens of its prompt, computed or cached, that a chunk has before it.
"""

from math import inf

from prefill.step_cost import StepCost

ITL_MARGIN = 0.9
"""Part of the target that a step may take; the rest goes to what happens between steps."""
MIN_PREFILL_TOKENS = 16
"""A prompt makes at least this progress per step, however slow the steps are."""
FIXED_PART = 0.1
"""A step that spends this part of its time on what every step costs is economical: a larger one is hardly better."""
FIXED_PART_AT_MOST = 0.25
"""The part that is not exceeded for the sake of those who may come."""


def prefill_budget(
    cost: StepCost, decode_tokens: int, itl_s: float, full_tokens: int, before: int = 0, overrun: float = 1.0
) -> int:
    """Prompt tokens that a step with `decode_tokens` may hold, at most `full_tokens`: all of them without decodes.

    `overrun`: times as long as predicted that it may take.
    """
    if decode_tokens == 0:
        return full_tokens
    return _fitting(cost, decode_tokens, ITL_MARGIN * itl_s / overrun, full_tokens, before)


def yielding_budget(cost: StepCost, longest_step_s: float, full_tokens: int, before: int = 0) -> int:
    """Prompt tokens of a step that ends soon enough for those who come meanwhile, at most `full_tokens`.

    Never so few that the worker would do much less: everybody would wait for that.
    """
    if longest_step_s == inf:
        return full_tokens
    least = economical_tokens(cost, full_tokens, FIXED_PART_AT_MOST)
    return max(_fitting(cost, 0, longest_step_s, full_tokens, before), least)


def fill_tokens(cost: StepCost, first_tokens: int, held_up_s: float, full_tokens: int) -> int:
    """Up to how many prompt tokens a step with `first_tokens` of the most urgent prompt is filled with others.

    Until it is economical, and takes at most `held_up_s` longer than without.
    """
    others = full_tokens if held_up_s == inf else int(held_up_s / cost.prefill_token_s)
    return min(economical_tokens(cost, full_tokens), first_tokens + others)


def economical_tokens(cost: StepCost, full_tokens: int, fixed_part: float = FIXED_PART) -> int:
    """Prompt tokens with which what every step costs is that part of its time, at most `full_tokens`."""
    return min(full_tokens, int(cost.fixed_s * (1 - fixed_part) / fixed_part / cost.prefill_token_s))


def _fitting(cost: StepCost, decode_tokens: int, longest_s: float, full_tokens: int, before: int) -> int:
    fitting = cost.tokens_within(longest_s - cost.seconds(0, decode_tokens), before)
    return min(full_tokens, max(MIN_PREFILL_TOKENS, fitting))
