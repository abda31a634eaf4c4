"""Which sessions start when, and what each says. Pure and deterministic."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lab.load.arrivals import Process, arrival_times
from lab.load.work import WorkClass

_SESSIONS_PER_SEED = 10**6
_SHARED_SEED = 10**12
"""Articles with seeds from here on are shared by the sessions of a class; no session has one of its own there."""


@dataclass(frozen=True)
class Session:
    """One client: a request, or several that follow each other."""

    start_s: float
    """From the start of the load."""
    work: WorkClass
    number: int
    """Counted over all classes, in order of arrival."""
    seed: int
    """Of the text that is this session's own."""
    shared_seed: int


def plan_sessions(
    classes: Sequence[WorkClass], seconds: float, seed: int, process: Process = "poisson", cv: float = 2.0
) -> list[Session]:
    """All sessions in order of their start. Classes draw apart: adding one does not move the others."""
    starts: list[tuple[float, int]] = []
    for index, work in enumerate(classes):
        rng = random.Random(f"{seed}/{work.name}")
        starts += [(at_s, index) for at_s in arrival_times(process, work.rate_per_s, seconds, rng, cv)]
    return [
        Session(
            at_s,
            classes[index],
            number,
            seed * _SESSIONS_PER_SEED + number,
            _SHARED_SEED + seed * _SESSIONS_PER_SEED + index,
        )
        for number, (at_s, index) in enumerate(sorted(starts))
    ]
