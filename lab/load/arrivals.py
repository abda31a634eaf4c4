"""When requests are sent. Pure: the same generator gives the same times."""

import random
from typing import Literal

Process = Literal["poisson", "gamma", "even"]


def arrival_times(
    process: Process, rate_per_s: float, seconds: float, rng: random.Random, cv: float = 2.0
) -> list[float]:
    """Seconds from the start, in order, below `seconds`.

    Args:
        process: `poisson`; `gamma`, whose gaps have the coefficient of variation `cv` (above 1 is burstier than
            Poisson, 1 is Poisson); `even`, always the same gap.
        rate_per_s: of arrivals, on average.
        seconds: how long they come.
        rng: draws the gaps.
        cv: for `gamma`; must be above 0.
    """
    times: list[float] = []
    at_s = 0.0
    while (at_s := at_s + _gap_s(process, rate_per_s, rng, cv)) < seconds:
        times.append(at_s)
    return times


def _gap_s(process: Process, rate_per_s: float, rng: random.Random, cv: float) -> float:
    match process:
        case "poisson":
            return rng.expovariate(rate_per_s)
        case "gamma":
            # Mean 1/rate and standard deviation cv/rate: shape 1/cv^2, scale cv^2/rate.
            return rng.gammavariate(1 / cv**2, cv**2 / rate_per_s)
        case "even":
            return 1 / rate_per_s
