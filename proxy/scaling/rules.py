"""What the operator decided about the numbers of workers. Times in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.scheduling.view import Role


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one pool, in workers."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Read by `autoscaler.Autoscaler`."""

    bounds: Mapping[Role, Bounds]
    goal: float = 0.96
    """Share of requests that are to be within each target."""
    every_s: float = 5.0
    """Between two looks."""
    window_s: float = 60.0
    """Of load, for ordinary growth; a jump is seen in a quarter of it, a slow rise in several."""
    hold_s: float = 300.0
    """A smaller pool must have been enough for so long before one becomes smaller."""
    margin: float = 0.08
    """By which load may grow in a pool that is just not too large; one that changes gets room for half of it."""
    devices: int | None = None
    """GPUs, or shares of a machine's cores, for both pools together; None: as many as it takes."""
    ranks: Mapping[Role, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    """Devices of one worker."""
    convertible: bool = True
    """A worker of one pool can do the work of one of the other."""
