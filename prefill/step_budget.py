"""Learns how long an engine's steps take, and how many prompt tokens one may hold. No vLLM, no clock.

A step takes `fixed_s + prefill_token_s * prefill tokens + decode_token_s * decode tokens`. Steps are kept by size, a
few of each, and the median of each size counts: a hiccup changes nothing, and what was learned of small steps is not
forgotten while only large ones run. Where too little was seen, a prior decides.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

ITL_MARGIN = 0.9
"""Part of the target that a step may take; the rest goes to what happens between steps."""
MIN_PREFILL_TOKENS = 16
"""A prompt makes at least this progress per step, however slow the steps are."""
FIXED_PART = 0.1
"""An economical step spends at most this part of its time on what every step costs."""
STEPS_PER_SIZE = 9
STEPS_TO_COUNT = 3
FORGET_AFTER_STEPS = 4096
FRESH_FOR_STEPS = 16
"""What was seen longer ago counts less and less, as long as there is something newer."""
_PRIOR_WEIGHT = 1e-6
_LEAST_OF_PRIOR = 0.005
"""A prompt token costs at least this part of the prior, or one misfit would lift the bound altogether."""
_PARTS = 3


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, by what it holds."""

    fixed_s: float
    prefill_token_s: float
    """Above 0."""
    decode_token_s: float

    def seconds(self, prefill_tokens: int, decode_tokens: int) -> float:
        """Predicted duration of a step."""
        return self.fixed_s + self.prefill_token_s * prefill_tokens + self.decode_token_s * decode_tokens


CPU_PRIOR = StepCost(fixed_s=0.02, prefill_token_s=1e-3, decode_token_s=0.01)
"""A small model on one core."""
GPU_PRIOR = StepCost(fixed_s=0.01, prefill_token_s=3e-5, decode_token_s=5e-5)


def prefill_budget(cost: StepCost, decode_tokens: int, itl_s: float, full_tokens: int) -> int:
    """Prompt tokens that a step with `decode_tokens` may hold, at most `full_tokens`: all of them without decodes."""
    if decode_tokens == 0:
        return full_tokens
    time_left_s = ITL_MARGIN * itl_s - cost.seconds(0, decode_tokens)
    fitting = int(max(0.0, time_left_s) / cost.prefill_token_s)
    return min(full_tokens, max(MIN_PREFILL_TOKENS, fitting))


def economical_tokens(cost: StepCost, full_tokens: int) -> int:
    """Prompt tokens from which on a larger step is hardly more efficient, at most `full_tokens`."""
    return min(full_tokens, int(cost.fixed_s * (1 - FIXED_PART) / FIXED_PART / cost.prefill_token_s))


@dataclass(slots=True)
class _Size:
    """Steps of about one size: (prefill tokens, decode tokens, seconds)."""

    steps: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=STEPS_PER_SIZE))
    last_step: int = 0

    def median(self) -> tuple[int, int, float]:
        return sorted(self.steps, key=lambda step: step[2])[len(self.steps) // 2]


class StepCosts:
    """Observed steps and the costs that explain them best."""

    def __init__(self, prior: StepCost) -> None:
        self._prior = prior
        self._cost = prior
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._num_steps = 0

    @property
    def cost(self) -> StepCost:
        """The costs as known so far."""
        return self._cost

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """One step that held tokens and took `seconds`."""
        if seconds <= 0 or prefill_tokens + decode_tokens <= 0:
            return
        self._num_steps += 1
        size = self._sizes.setdefault((prefill_tokens.bit_length(), decode_tokens.bit_length()), _Size())
        size.steps.append((prefill_tokens, decode_tokens, seconds))
        size.last_step = self._num_steps
        # The early ones teach most; later an occasional look is enough.
        if self._num_steps <= 64 or self._num_steps % 8 == 0:
            self._learn()

    def _learn(self) -> None:
        oldest = self._num_steps - FORGET_AFTER_STEPS
        self._sizes = {key: size for key, size in self._sizes.items() if size.last_step > oldest}
        known = [size for size in self._sizes.values() if len(size.steps) >= STEPS_TO_COUNT]
        steps = [size.median() for size in known]
        prior = np.array([self._prior.fixed_s, self._prior.prefill_token_s, self._prior.decode_token_s])
        # Unknowns are multiples of the prior, and errors are relative: so all numbers are near 1.
        rows = np.array([(1.0, prefill, decode) for prefill, decode, _ in steps]).reshape(-1, _PARTS) * prior
        rows /= np.array([seconds for _, _, seconds in steps]).reshape(-1, 1)
        ages = np.array([self._num_steps - size.last_step for size in known]) / FRESH_FOR_STEPS
        try:
            costs = prior * _non_negative(rows, 1 / (1 + ages**2))
        except np.linalg.LinAlgError:
            return  # absurdly short steps; what was known stays, an exception would end the engine
        least_s = _LEAST_OF_PRIOR * self._prior.prefill_token_s
        self._cost = StepCost(float(costs[0]), max(float(costs[1]), least_s), float(costs[2]))


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
