"""What a model's policy says, as far as it decides when the model is up. Times in seconds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Terms:
    """As in `cluster.models.config.ModelConfig`."""

    policy: Literal["pinned", "on_demand", "scale_to_zero"] = "pinned"
    cost: int = 1
    min_residency_s: float = 60.0
    idle_s: float = 300.0
    on_starting: Literal["wait", "reject"] = "wait"
    start_wait_s: float = 120.0
    sleeps: bool = False
