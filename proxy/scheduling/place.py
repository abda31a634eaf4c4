"""Which prefill and which decode worker serve a request, and why.

The reason is one word of `REASONS`; it is the label under which the decision is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.scheduling.view import PoolView, RequestShape, WorkerView

REASONS = (
    "remote",
    "single_token",
    "sibling",
    "short_prompt",
    "nothing_to_move",
    "not_transferable",
    "no_prefill_worker",
    "no_compatible_pair",
    "no_decode_worker",
    "too_long",
)


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices, from `config.scheduling`."""

    remote_prefill_min_tokens: int
    """Prompts shorter than this are prefilled on the decode worker."""
    on_no_prefill: Literal["local", "queue", "reject"]


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
    """Nobody can take it now; ask again when the pool changes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The client is told `status` at once."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
    """When it is worth trying again; None: not known."""


Placement = Remote | PrefillOnly | Local | Wait | Reject


def place(request: RequestShape, view: PoolView, policy: Policy) -> Placement:
    """Decides for one request. The same arguments always give the same placement."""
    needed = request.num_prompt_tokens + 1
    decoders = [w for w in view.alive("decode") if w.max_model_len >= needed]
    prefillers = [w for w in view.alive("prefill") if w.max_model_len >= needed]
    if not decoders and view.alive("decode"):
        return _too_long(request, view.alive("decode"))
    if not decoders and any(w.in_transition for w in view.workers if w.role == "decode"):
        return Wait("no_decode_worker")
    if not decoders:
        return _without(policy, "no_decode_worker", "No decode worker is alive")
    decoders, prefillers = _others(decoders, request.avoid), _others(prefillers, request.avoid)
    local = _roomiest(decoders).worker_id

    if request.local_because:
        return Local(local, "not_transferable")
    if request.num_prompt_tokens < policy.remote_prefill_min_tokens:
        return Local(local, "short_prompt")
    if not request.first_token_mode and request.max_tokens > 1 and request.num_prompt_tokens < 2:
        # Exact mode moves all prompt tokens but the last one.
        return Local(local, "nothing_to_move")
    if not prefillers:
        return _without_prefill(policy, local, "no_prefill_worker", "No prefill worker is alive")
    if request.max_tokens <= 1 or needed >= min(w.max_model_len for w in (*prefillers, *decoders)):
        # One token is wanted, or the context has room for one.
        return PrefillOnly(_least_queued(prefillers).worker_id, "single_token")

    prefillers = [w for w in prefillers if any(view.can_pair(w, decoder) for decoder in decoders)]
    if not prefillers:
        message = "No prefill worker has a KV layout that fits a decode worker"
        return _without_prefill(policy, local, "no_compatible_pair", message)
    prefill = _least_queued(prefillers)
    decode = _roomiest([w for w in decoders if view.can_pair(prefill, w)])
    return Remote(prefill.worker_id, decode.worker_id, "remote")


def _others(workers: Sequence[WorkerView], avoid: str) -> list[WorkerView]:
    """Without the worker to avoid, unless it is the only one."""
    return [w for w in workers if w.worker_id != avoid] or list(workers)


def _least_queued(workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda w: (w.queued_tokens, w.num_requests))


def _roomiest(workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda w: (-w.blocks_free, w.num_requests))


def _without_prefill(policy: Policy, local: str, reason: str, message: str) -> Placement:
    match policy.on_no_prefill:
        case "local":
            return Local(local, reason)
        case "queue":
            return Wait(reason)
        case "reject":
            return Reject(503, reason, f"{message}, and the policy on_no_prefill is `reject`; try again later.")


def _without(policy: Policy, reason: str, message: str) -> Placement:
    if policy.on_no_prefill == "queue":
        return Wait(reason)
    return Reject(503, reason, f"{message}; try again later.")


def _too_long(request: RequestShape, decoders: Sequence[WorkerView]) -> Reject:
    longest = max(w.max_model_len for w in decoders)
    return Reject(
        400,
        "too_long",
        f"The prompt has {request.num_prompt_tokens} tokens; the longest context any worker accepts is {longest}.",
    )
