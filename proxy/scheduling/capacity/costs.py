"""How long work takes on one worker, learned from what it did, and how long answers get.

The seconds of a prefill are `each + token * n + pair * n * (cached + n / 2)`: something per request, something per
token, and something for each token that each token attends to. That is linear in its three coefficients, so the seconds
in which a worker finished *several* requests are a sample too, in whatever order their chunks were computed.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

LEARNING_RATE = 0.15
ENOUGH_SAMPLES = 4
MAX_SURPRISE = 1.0
"""One sample counts as at most this much (relative to the prediction) too slow: a stall is no new speed."""
MIN_EXPECTED_OUTPUT = 512
LENGTHS_KEPT = 256
PAIR_SHARE = 1 / 50_000
"""Attending to 50,000 tokens costs about as much as the rest of a token's computation."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prefills, added up."""

    requests: int = 0
    tokens: int = 0
    """That had to be computed."""
    pairs: float = 0.0
    """(token, token it attends to), for causal attention."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.requests + other.requests, self.tokens + other.tokens, self.pairs + other.pairs)


def prefill_work(num_tokens: int, cached: int = 0) -> Work:
    """Of one prompt, of which `cached` further tokens need not be computed."""
    return Work(1, num_tokens, num_tokens * (cached + num_tokens / 2))


class CostModel:
    """The speed of one worker. Seconds.

    `others`: what is believed of a worker that has not computed anything yet. A guess that is too low would never be
    corrected, because nobody would give it work.
    """

    __slots__ = ("_others", "_priors", "each_s", "num_samples", "pair_s", "step_s", "token_s")

    def __init__(self, tokens_per_s: float, step_s: float, others: "CostModel | None" = None) -> None:
        self._others = others
        self.token_s = 1.0 / tokens_per_s
        self.each_s = step_s / 2
        self.pair_s = self.token_s * PAIR_SHARE
        self.step_s = step_s
        """Of a decode step at the present batch."""
        self._priors = (self.each_s, self.token_s, self.pair_s)
        self.num_samples = 0

    @property
    def is_learned(self) -> bool:
        """It has seen enough to be believed against what was configured."""
        return self.num_samples >= ENOUGH_SAMPLES

    def prefill_s(self, num_tokens: int, cached: int = 0) -> float:
        """Of one prompt of which `num_tokens` must be computed and `cached` more are there."""
        if self._others is not None:
            return self._others.prefill_s(num_tokens, cached)
        return self.each_s + num_tokens * (self.token_s + self.pair_s * (cached + num_tokens / 2))

    def seconds(self, work: Work) -> float:
        """Of several prefills."""
        if self._others is not None:
            return self._others.seconds(work)
        return work.requests * self.each_s + work.tokens * self.token_s + work.pairs * self.pair_s

    def observe_prefill(self, work: Work, seconds: float) -> None:
        """The worker did nothing but `work` for `seconds`.

        The error is shared out over the coefficients by how much each contributes (normalised least mean squares), so
        prompts of one size cannot make the model forget what it knew of others.
        """
        if self._others is not None:
            begin, self._others = self._others, None
            self.each_s, self.token_s, self.pair_s = begin.each_s, begin.token_s, begin.pair_s
        expected_s = self.seconds(work)
        error_s = max(-expected_s / 2, min(seconds - expected_s, expected_s * MAX_SURPRISE))
        inputs = (work.requests, work.tokens, work.pairs)
        weights = [prior * prior * value for prior, value in zip(self._priors, inputs, strict=True)]
        norm = sum(weight * value for weight, value in zip(weights, inputs, strict=True))
        if norm <= 0.0:
            return
        self.num_samples += 1
        step = max(LEARNING_RATE, 1.0 / (self.num_samples + 1)) * error_s / norm
        # Nothing is ever free, or the model could not grow again.
        self.each_s = max(self.each_s + step * weights[0], self._priors[0] / 1000)
        self.token_s = max(self.token_s + step * weights[1], self._priors[1] / 1000)
        self.pair_s = max(self.pair_s + step * weights[2], self._priors[2] / 1000)

    def observe_step(self, seconds: float) -> None:
        """Two outputs of running requests were `seconds` apart."""
        self.step_s += LEARNING_RATE * (min(seconds, self.step_s * (1 + MAX_SURPRISE)) - self.step_s)


class Caution:
    """By how much predictions must be stretched so that nine of ten first tokens come no later.

    Of each class: long prompts that have time are overtaken after they were sent, and strict ones are not.
    """

    LEAST, MOST, STEP = 1.05, 2.0, 0.05

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}

    def of(self, slo_class: str) -> float:
        """The factor for a class."""
        return self._factors.get(slo_class, self.LEAST)

    def observe(self, slo_class: str, predicted_s: float, actual_s: float) -> None:
        """A prompt has been computed; both from the moment it was sent to its worker."""
        factor = self.of(slo_class)
        change = 0.9 if actual_s > predicted_s * factor else -0.1
        self._factors[slo_class] = min(self.MOST, max(self.LEAST, factor + self.STEP * change))


class OutputLengths:
    """How long answers get: the 90th percentile of the last ones."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """An answer ended by itself."""
        if len(self._recent) == LENGTHS_KEPT:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    @property
    def usual(self) -> int:
        """Tokens that nine of ten answers need at most."""
        p90 = self._sorted[len(self._sorted) * 9 // 10] if self._sorted else 0
        return max(p90, MIN_EXPECTED_OUTPUT)

    def expected(self, max_tokens: int) -> int:
        """Tokens to keep free for an answer of at most `max_tokens`."""
        return min(max_tokens, self.usual)
