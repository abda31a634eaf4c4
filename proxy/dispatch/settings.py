"""What the operator decided about requests, with every `auto` resolved."""

from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.configuration.security import RateLimitsConfig
from proxy.scheduling.place import Policy

GPU_BREAK_EVEN_TOKENS = 2048
CPU_BREAK_EVEN_TOKENS = 64
"""Below this a prompt costs the decode core less than one hand-over and one more queue."""
GPU_PREFILL_TOKENS_PER_S, GPU_DECODE_STEP_S = 8000.0, 0.02
CPU_PREFILL_TOKENS_PER_S, CPU_DECODE_STEP_S = 900.0, 0.04
"""Starting points, corrected by what workers do: a 70B model on a few large GPUs, the embedded one on one core."""
NO_LIMITS = RateLimitsConfig()


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Read by `Dispatcher`. Times in seconds."""

    policy: Policy
    reserve_at_start: bool
    """Submit the decode leg when the prefill starts, not when it has ended."""
    queue_timeout_s: float
    """For room at a worker."""
    absent_timeout_s: float
    """For a worker that could take a request at all."""
    hold_every_s: float
    """How often prefill workers are told which leases are still wanted."""
    max_losses: int = 3
    """So many workers lost in a row without a new token in between, and a request fails."""
    rate_limits: RateLimitsConfig = NO_LIMITS
    keys_are_checked: bool = False
    """Who sends a key has been given it."""


def dispatch_settings(config: ClusterConfig, on_gpu: bool, keys_are_checked: bool = False) -> DispatchSettings:
    """From the configuration; `auto` means the break-even of the workers' devices."""
    given = config.scheduling
    threshold, tokens_per_s, step_s = (
        given.remote_prefill_min_tokens,
        given.prior_prefill_tokens_per_s,
        given.prior_decode_step_s,
    )
    if threshold == "auto":
        threshold = GPU_BREAK_EVEN_TOKENS if on_gpu else CPU_BREAK_EVEN_TOKENS
    if tokens_per_s == "auto":
        tokens_per_s = GPU_PREFILL_TOKENS_PER_S if on_gpu else CPU_PREFILL_TOKENS_PER_S
    if step_s == "auto":
        step_s = GPU_DECODE_STEP_S if on_gpu else CPU_DECODE_STEP_S
    return DispatchSettings(
        policy=Policy(threshold, given.on_no_prefill, given.max_queued_requests, tokens_per_s, step_s),
        reserve_at_start=config.scheduling.reserve == "at_prefill_start",
        queue_timeout_s=config.scheduling.queue_timeout_s,
        absent_timeout_s=config.scheduling.absent_timeout_s,
        hold_every_s=config.transfer.beat_s,
        max_losses=config.scheduling.max_losses,
        rate_limits=config.server.rate_limits,
        keys_are_checked=keys_are_checked,
    )
