"""How many prefill workers keep first tokens in time.

Prompts go to whoever is free first: a queue with several servers. The share that waits longer than t is about
`rho ** (sqrt(2 (c + 1)) - 1) * exp(-2 c (1 - rho) t / (s (1 + cv^2)))` for c workers that are busy for a share rho of
the time, prompts of s seconds on average and their coefficient of variation cv (Sakasegawa; Allen and Cunneen). Where
those that cannot be in time go behind the others, or are refused, they delay nobody, and of that share p only about
`(1 - rho) p / (1 - rho p)` is late (exact for exponential times).
"""

from collections.abc import Sequence
from math import ceil, exp, sqrt

MAX_BUSY = 0.97
"""No pool is planned to be busy for more of the time: what comes varies over minutes, too."""
MAX_SAMPLES = 32


def share_late(workers: int, load: float, service_s: Sequence[float], target_s: float, *, gives_way: bool) -> float:
    """Share of prompts whose first token comes later than `target_s`, without those that alone take longer than that.

    `load`: seconds of work per second. `service_s`: a sample of what prompts take. `gives_way`: who cannot be in time
    goes behind the others, or is refused.
    """
    if load <= 0 or not service_s:
        return 0.0
    busy = load / max(1, workers)
    if busy >= MAX_BUSY:
        return 1.0
    mean_s = sum(service_s) / len(service_s)
    squares = sum(s * s for s in service_s) / len(service_s)
    if mean_s <= 0:
        return 0.0
    waits: float = busy ** (sqrt(2 * (workers + 1)) - 1)
    decay = 2 * workers * (1 - busy) * mean_s / squares
    sampled = service_s[:: max(1, len(service_s) // MAX_SAMPLES)]
    feasible = [s for s in sampled if s <= target_s]
    if not feasible:
        return 0.0
    late = sum(waits * exp(-decay * (target_s - s)) for s in feasible) / len(feasible)
    return (1 - busy) * late / (1 - busy * late) if gives_way else late


def prefill_workers(
    load: float, service_s: Sequence[float], target_s: float, goal: float, most: int, *, gives_way: bool
) -> int:
    """The fewest workers with which a share `goal` is in time; one more than `most` if that is not enough."""
    if load <= 0:
        return 0
    workers = max(1, ceil(load / MAX_BUSY - 1e-9))
    while workers <= most and share_late(workers, load, service_s, target_s, gives_way=gives_way) > 1 - goal:
        workers += 1
    return min(workers, most + 1)
