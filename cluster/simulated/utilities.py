"""Engine calls that a proxy may make of every worker, as a simulated engine answers them."""

from typing import Any

from cluster import messages as wire
from cluster.simulated.engine.paged_engine import SimulatedEngine

_NOTHING = frozenset({"reset_mm_cache", "reset_encoder_cache", "profile"})


def answer_utility(method: str, args: list[Any], engine: SimulatedEngine) -> tuple[str, Any]:
    """An error, empty on success, and the result. Sleeping is no affair of this (`cluster.host.slumber`).

    Adapters are taken by name: there are no weights to read.
    """
    if method not in wire.ALLOWED_UTILITIES:
        return f"{method} is not a utility a proxy may call", None
    if method == "reset_prefix_cache":
        return "", engine.reset_prefix_cache()
    if method in _NOTHING:
        return "", None
    return _about_adapters(method, args, engine.adapters)


def _about_adapters(method: str, args: list[Any], adapters: dict[int, str]) -> tuple[str, Any]:
    match method, args:
        case "list_loras", _:
            return "", list(adapters)
        case "add_lora", [[str(name), int(number), *_]]:
            adapters[number] = name
            return "", True
        case "remove_lora", [int(number)]:
            return "", adapters.pop(number, None) is not None
        case "pin_lora", [int(number)]:
            return "", number in adapters
    return f"{method} cannot be carried out with {args}", None
