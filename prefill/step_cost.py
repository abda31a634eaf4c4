"""Learns how long an engine's steps take. No vLLM, no clock.

A step takes `fixed_s + prefill_token_s * prefill tokens + pair_s * pairs + decode_token_s * decode tokens`, where the
pairs are those of attention: each prefill token with each token before it. Steps are kept by size, a few of each, and
the median of each size counts: a hiccup changes nothing, and what was learned of small steps is not forgotten while
only large ones run. Where too little was seen, a prior decides.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

STEPS_PER_SIZE = 9
STEPS_TO_COUNT = 3
FORGET_AFTER_STEPS = 4096
FRESH_FOR_STEPS = 16
"""What was seen longer ago counts less and less, as long as there is something newer."""
MIXED_STEPS = 64
OVERRUN_PRIOR = 1.25
OVERRUN_AT_MOST = 1.5
"""Beyond that the machine is disturbed, and shorter steps would not help."""
_PRIOR_WEIGHT = 1e-9
_LEAST_OF_PRIOR = 0.005
"""A prompt token costs at least this part of the prior, or one misfit would lift the bound altogether."""
_PARTS = 4


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, by what it holds."""

    fixed_s: float
    prefill_token_s: float
    """Above 0."""
    decode_token_s: float
    pair_s: float = 0.0

    def seconds(self, prefill_tokens: int, decode_tokens: int, pairs: float = 0.0) -> float:
        """Predicted duration of a step."""
        return self.fixed_s + self.prompt_s(prefill_tokens, pairs) + self.decode_token_s * decode_tokens

    def prompt_s(self, prefill_tokens: int, pairs: float) -> float:
        """What the prompt's tokens add to a step."""
        return self.prefill_token_s * prefill_tokens + self.pair_s * pairs

    def tokens_within(self, seconds: float, before: int) -> int:
        """Tokens of a prompt, behind `before` others of it, that add at most `seconds` to a step."""
        if seconds <= 0:
            return 0
        # pair_s / 2 * n^2 + linear * n = seconds
        linear = self.prefill_token_s + self.pair_s * before
        return int(2 * seconds / (linear + (linear * linear + 2 * self.pair_s * seconds) ** 0.5))


def pairs_of(num_tokens: int, before: int) -> float:
    """Of a chunk of a prompt: each token with those before it, of this chunk and of earlier ones."""
    return num_tokens * (before + num_tokens / 2)


CPU_PRIOR = StepCost(fixed_s=0.03, prefill_token_s=1.25e-3, decode_token_s=0.01, pair_s=9e-7)
"""A small model on one core."""
GPU_PRIOR = StepCost(fixed_s=0.01, prefill_token_s=3e-5, decode_token_s=5e-5, pair_s=1.5e-9)


@dataclass(frozen=True, slots=True)
class Step:
    """What one held, and how long it took."""

    prefill_tokens: int
    decode_tokens: int
    pairs: float
    seconds: float

    @property
    def size(self) -> tuple[int, int, int]:
        """About: tokens of prompts, tokens before them, tokens of decodes."""
        before = int(self.pairs / self.prefill_tokens) if self.prefill_tokens else 0
        return (self.prefill_tokens.bit_length(), before.bit_length(), self.decode_tokens.bit_length())


@dataclass(slots=True)
class _Size:
    """Steps of about one size."""

    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS_PER_SIZE))
    last_step: int = 0

    def median(self) -> Step:
        return sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]


class StepCosts:
    """Observed steps and the costs that explain them best."""

    def __init__(self, prior: StepCost) -> None:
        self._prior = prior
        self._cost = prior
        self._sizes: dict[tuple[int, int, int], _Size] = {}
        self._num_steps = 0
        self._mixed: deque[Step] = deque(maxlen=MIXED_STEPS)
        self._overrun = OVERRUN_PRIOR

    @property
    def cost(self) -> StepCost:
        """The costs as known so far."""
        return self._cost

    @property
    def overrun(self) -> float:
        """Times as long as by `cost` that steps with both prompt tokens and decodes take, if not in one of twenty.

        What is learned is how long they take usually; a gap that is too long by bad luck is too long all the same. At
        least 1.
        """
        return self._overrun

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float, pairs: float = 0.0) -> None:
        """One step that held tokens and took `seconds`."""
        if seconds <= 0 or prefill_tokens + decode_tokens <= 0:
            return
        self._num_steps += 1
        step = Step(prefill_tokens, decode_tokens, pairs, seconds)
        if prefill_tokens and decode_tokens:
            self._mixed.append(step)
        size = self._sizes.setdefault(step.size, _Size())
        size.steps.append(step)
        size.last_step = self._num_steps
        # The early ones teach most; later an occasional look is enough.
        if self._num_steps <= 64 or self._num_steps % 8 == 0:
            self._learn()

    def _learn(self) -> None:
        oldest = self._num_steps - FORGET_AFTER_STEPS
        self._sizes = {key: size for key, size in self._sizes.items() if size.last_step > oldest}
        known = [size for size in self._sizes.values() if len(size.steps) >= STEPS_TO_COUNT]
        steps = [size.median() for size in known]
        prior = self._prior
        parts = np.array([prior.fixed_s, prior.prefill_token_s, prior.decode_token_s, prior.pair_s])
        # Unknowns are multiples of the prior, and errors are relative: so all numbers are near 1.
        held = [(1.0, step.prefill_tokens, step.decode_tokens, step.pairs) for step in steps]
        rows = np.array(held).reshape(-1, _PARTS) * parts
        rows /= np.array([step.seconds for step in steps]).reshape(-1, 1)
        ages = np.array([self._num_steps - size.last_step for size in known]) / FRESH_FOR_STEPS
        try:
            costs = parts * _non_negative(rows, 1 / (1 + ages**2))
        except np.linalg.LinAlgError:
            return  # absurdly short steps; what was known stays, an exception would end the engine
        least_s = _LEAST_OF_PRIOR * prior.prefill_token_s
        self._cost = StepCost(float(costs[0]), max(float(costs[1]), least_s), float(costs[2]), float(costs[3]))
        if len(self._mixed) >= STEPS_TO_COUNT:
            times = [s.seconds / self._cost.seconds(s.prefill_tokens, s.decode_tokens, s.pairs) for s in self._mixed]
            self._overrun = min(OVERRUN_AT_MOST, max(1.0, float(np.quantile(times, 0.95))))


def _non_negative(rows: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares of `rows @ x = 1`, drawn weakly towards x = 1; negative parts are dropped one by one.

    `rows` is [steps, parts], `weights` [steps]; the result is [parts].
    """
    free = list(range(_PARTS))
    solution = np.zeros(_PARTS)
    while free:
        part = rows[:, free]
        matrix = part.T @ (part * weights[:, None]) + _PRIOR_WEIGHT * np.eye(len(free))
        found = np.linalg.solve(matrix, weights @ part + _PRIOR_WEIGHT)
        lowest = int(np.argmin(found))
        if found[lowest] >= 0:
            solution[free] = found
            break
        del free[lowest]
    return solution
