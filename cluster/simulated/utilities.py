"""Engine calls that a proxy may make of every worker, as a simulated engine answers them."""

from typing import Any

from cluster import messages as wire
from cluster.simulated.engine.paged_engine import SimulatedEngine

_NOTHING = frozenset({"reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up", "is_sleeping", "profile"})


def answer_utility(method: str, engine: SimulatedEngine) -> tuple[str, Any]:
    """An error, empty on success, and the result. What a host has to do by itself is answered with None."""
    if method not in wire.ALLOWED_UTILITIES:
        return f"{method} is not a utility a proxy may call", None
    if method == "reset_prefix_cache":
        return "", engine.reset_prefix_cache()
    if method == "list_loras":
        return "", []
    if method in _NOTHING:
        return "", None
    return f"a simulated engine has no adapters, so {method} cannot be carried out", None
