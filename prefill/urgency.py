"""How urgent a request is, as the proxy said when it arrived at the engine.

The proxy puts it into `sampling_params.extra_args["twinpool"]`:
`{"ttft_left_s": float, "priority": int, "itl_s": float, "longest_step_s": float}`, each of them optional.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "twinpool"
DEFAULT_TTFT_S = 600.0
"""For requests that nobody set a deadline for: they run in order of arrival, behind those with deadlines."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """Times are of the engine core's monotonic clock."""

    arrival_s: float
    deadline_s: float
    """For the first token; may lie in the past."""
    priority: int
    """Lower goes first."""
    itl_s: float | None
    """Longest gap between two of its tokens; None: the cluster's target."""
    longest_step_s: float = math.inf
    """A step on its prompt may take so long: somebody with a stricter deadline may come meanwhile."""


def read_urgency(extra_args: Mapping[str, Any] | None, arrival_s: float, priority: int) -> Urgency:
    """What `extra_args` say, with `priority` (vLLM's own) where they say nothing. Raises ValueError for nonsense."""
    said = (extra_args or {}).get(KEY, {})
    if not isinstance(said, Mapping):
        raise ValueError(f"extra_args.{KEY} is {said!r}: expected an object")
    ttft_left_s = _seconds(said, "ttft_left_s")
    itl_s = _duration(said, "itl_s")
    longest_step_s = _duration(said, "longest_step_s")
    rank = said.get("priority", priority)
    if not isinstance(rank, int):
        raise ValueError(f"extra_args.{KEY}.priority is {rank!r}: expected a whole number")
    deadline_s = arrival_s + (DEFAULT_TTFT_S if ttft_left_s is None else ttft_left_s)
    return Urgency(arrival_s, deadline_s, rank, itl_s, math.inf if longest_step_s is None else longest_step_s)


def _duration(said: Mapping[str, Any], name: str) -> float | None:
    value = _seconds(said, name)
    if value is not None and value <= 0:
        raise ValueError(f"extra_args.{KEY}.{name} is {value}: expected seconds above 0")
    return value


def _seconds(said: Mapping[str, Any], name: str) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"extra_args.{KEY}.{name} is {value!r}: expected seconds")
    return float(value)
