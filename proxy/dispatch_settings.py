"""What the operator decided about requests, with every `auto` resolved."""

from dataclasses import dataclass

from cluster.config import ClusterConfig
from proxy.scheduling.place import Policy

GPU_BREAK_EVEN_TOKENS = 2048
CPU_BREAK_EVEN_TOKENS = 64
"""Below this a prompt costs the decode core less than one hand-over and one more queue."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Read by `dispatch.Dispatcher`. Times in seconds."""

    policy: Policy
    reserve_at_start: bool
    """Submit the decode leg when the prefill starts, not when it has ended."""
    queue_timeout_s: float
    hold_every_s: float
    """How often prefill workers are told which leases are still wanted."""
    max_losses: int = 3
    """So many workers lost in a row without a new token in between, and a request fails."""


def dispatch_settings(config: ClusterConfig, on_gpu: bool) -> DispatchSettings:
    """From the configuration; `auto` means the break-even of the workers' devices."""
    threshold = config.scheduling.remote_prefill_min_tokens
    if threshold == "auto":
        threshold = GPU_BREAK_EVEN_TOKENS if on_gpu else CPU_BREAK_EVEN_TOKENS
    return DispatchSettings(
        policy=Policy(threshold, config.scheduling.on_no_prefill),
        reserve_at_start=config.scheduling.reserve == "at_prefill_start",
        queue_timeout_s=config.scheduling.queue_timeout_s,
        hold_every_s=config.transfer.beat_s,
        max_losses=config.scheduling.max_losses,
    )
