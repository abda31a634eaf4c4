"""How urgent a leg is, as its engine is told.

The engine's half is `prefill/urgency.py`: `sampling_params.extra_args["twinpool"]`.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from proxy.scheduling.slo import Standing

KEY = "twinpool"


@dataclass(frozen=True, slots=True)
class Urgency:
    """At the moment a leg is sent."""

    ttft_left_s: float
    """Until its first token is due; negative when it is late."""
    priority: int
    """Lower goes first."""
    itl_s: float
    """Longest gap between two tokens."""
    longest_step_s: float = inf
    """For the steps on its prompt."""

    def extra_args(self) -> dict[str, Any]:
        """In the form the engine reads."""
        said = {"ttft_left_s": self.ttft_left_s, "priority": self.priority, "itl_s": self.itl_s}
        return {KEY: said if self.longest_step_s == inf else {**said, "longest_step_s": self.longest_step_s}}


def urgency_of(standing: Standing, arrived_s: float, now_s: float) -> Urgency:
    """Of a request that arrived at the proxy at `arrived_s`; both times are of the proxy's monotonic clock."""
    slo = standing.slo
    return Urgency(arrived_s + slo.ttft_s - now_s, standing.priority, slo.itl_s, slo.longest_step_s)
