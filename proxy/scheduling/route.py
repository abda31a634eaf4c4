"""Which way a request can go at all, whoever is busy: from its shape and who is there."""

from collections.abc import Mapping
from typing import Literal

from proxy.scheduling.capacity.pools import Pools
from proxy.scheduling.place import Local, Policy, PrefillOnly, Reject, Remote, Wait
from proxy.scheduling.view import RequestShape

Route = Local | PrefillOnly | Remote | Wait | Reject
"""Like a placement; the workers in it are left open, except where only one will do."""
LaneName = Literal["prefill", "decode", "nobody"]


def route(shape: RequestShape, pools: Pools, cached: Mapping[str, int]) -> Route:
    """`cached`: tokens of the prompt that decode workers have. The same arguments always give the same route."""
    policy, needed = pools.policy, shape.num_prompt_tokens + 1
    if not pools.decode_lens:
        return _without_decode(pools)
    prefill_lens, decode_lens = pools.lens_with(shape.adapter)
    if not decode_lens:
        return _without_adapter(shape, pools)
    if needed > decode_lens[-1]:
        return _too_long(shape, decode_lens[-1])
    if shape.local_because:
        return Local("", "not_transferable")
    if shape.num_prompt_tokens < policy.remote_prefill_min_tokens:
        return Local("", "short_prompt")
    if not shape.first_token_mode and shape.max_tokens > 1 and shape.num_prompt_tokens < 2:
        # Exact mode moves all prompt tokens but the last one.
        return Local("", "nothing_to_move")
    allows = pools.adapters.allows
    cached = {w: n for w, n in cached.items() if w in pools.decode and w != shape.avoid and allows(w, shape.adapter)}
    best = max(cached, key=lambda w: (cached[w], -pools.decode[w].facts.index), default="")
    if best and shape.num_prompt_tokens - cached[best] < policy.remote_prefill_min_tokens:
        return Local(best, "cached_prefix")
    if pools.prefill_lens and not prefill_lens:
        return _without_prefill(policy, "no_adapter", "No prefill worker has the adapter")
    if not prefill_lens or needed > prefill_lens[-1]:
        return _without_prefill(policy, "no_prefill_worker", "No prefill worker is alive")
    if shape.max_tokens <= 1 or needed >= pools.shortest_context(needed):
        # One token is wanted, or the context has room for one.
        return PrefillOnly("", "single_token")
    if not pools.can_hand_over(needed, shape.adapter):
        message = "No prefill worker has a KV layout that fits a decode worker"
        return _without_prefill(policy, "no_compatible_pair", message)
    return Remote("", "", "remote")


def lane_of(way: Route) -> LaneName:
    """What a request that goes this way waits for."""
    match way:
        case Local():
            return "decode"
        case PrefillOnly() | Remote():
            return "prefill"
        case Wait() | Reject():
            return "nobody"


def _without_prefill(policy: Policy, reason: str, message: str) -> Route:
    match policy.on_no_prefill:
        case "local":
            return Local("", reason)
        case "queue":
            return Wait(reason)
        case "reject":
            return Reject(503, reason, f"{message}, and the policy on_no_prefill is `reject`; try again later.")


def _without_decode(pools: Pools) -> Route:
    if pools.policy.on_no_prefill == "queue" or "decode" in pools.awaited:
        return Wait("no_decode_worker")
    return Reject(503, "no_decode_worker", "No decode worker is alive; try again later.")


def _without_adapter(shape: RequestShape, pools: Pools) -> Route:
    """No decode worker has it: it is being loaded into one that came back, or was removed since the request came."""
    if shape.adapter in pools.adapters.known:
        return Wait("no_adapter")
    return Reject(404, "no_adapter", "The adapter that this request names as its model has been removed.")


def _too_long(shape: RequestShape, longest: int) -> Reject:
    return Reject(
        400,
        "too_long",
        f"The prompt has {shape.num_prompt_tokens} tokens; the longest context any worker accepts is {longest}.",
    )
