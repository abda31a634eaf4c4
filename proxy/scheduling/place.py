"""What can be decided about a request, and why; and the operator's choices that decide it.

The reason is one word of `REASONS`; it is the label under which the decision is counted.
"""

from dataclasses import dataclass
from typing import Literal

REASONS = (
    # Where it went.
    "remote",
    "single_token",
    "sibling",
    "short_prompt",
    "cached_prefix",
    "nothing_to_move",
    "not_transferable",
    "prefill_busy",
    "prefill_late",
    "no_prefill_worker",
    "no_compatible_pair",
    "no_adapter",
    # Why it waits, or was refused.
    "no_decode_worker",
    "prefill_full",
    "decode_full",
    "too_late",
    "too_long",
    "queue_full",
)

OnNoPrefill = Literal["local", "queue", "reject"]


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices, from `config.scheduling`."""

    remote_prefill_min_tokens: int
    """Prompts with fewer tokens that a decode worker lacks are prefilled there."""
    on_no_prefill: OnNoPrefill
    max_queued_requests: int = 1000
    """Beyond it requests are answered 429. Those of which clients have got something do not count."""
    prior_prefill_tokens_per_s: float = 900.0
    """What a worker is believed to prefill before it has been watched."""
    prior_decode_step_s: float = 0.04


@dataclass(frozen=True, slots=True)
class Remote:
    """Prefill on one worker, hand over, decode on the other."""

    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """One token is all that is wanted: the prefill worker answers alone and nothing is handed over."""

    prefill: str
    reason: str


@dataclass(frozen=True, slots=True)
class Local:
    """Prefill and decode on the decode worker."""

    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody can take it now; it stays in the queue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The client is told `status` at once."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
    """When it is worth trying again; None: not known."""


CLOSED = Reject(503, "closed", "this cluster is being stopped and takes no new requests.", 30.0)
"""Its successor may be there by then."""

ASLEEP = Reject(503, "asleep", "this cluster is asleep and takes no requests until it is woken.", 10.0)

Placement = Remote | PrefillOnly | Local | Wait | Reject


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about one request."""

    request_id: str
    placement: Placement
    demoted: bool = False
    """It cannot be in time and goes behind all that can, in the proxy's queue and in the engine's."""
