"""The request that is left when a stream has lost its worker: the tokens sent are prompt, the rest is to be generated.

Relies on vLLM 0.32: the fields of `EngineCoreRequest`, all of which a continuation keeps but for the prompt and the
sampling parameters (`tests/unit/proxy/test_continuation.py` names them); scheduler and logits processors count
`max_tokens` and `min_tokens` from the end of the prompt; the detokenizer in the proxy counts them by itself.
"""

from collections.abc import Sequence
from copy import copy

from vllm.v1.engine import EngineCoreRequest

from proxy.legs.vllm_leg_requests import without_prompt_scores
from proxy.scheduling.continuation import forbidden_by


def why_not_continued(request: EngineCoreRequest, sent: Sequence[int], local_because: str) -> str:
    """What forbids to go on elsewhere after the tokens `sent`, as the end of a sentence; empty if nothing does.

    Args:
        request: the client's.
        sent: every token the client got.
        local_because: why the request cannot be handed over, from its shape.
    """
    params = request.sampling_params
    if local_because or params is None:
        return f"it cannot move between workers ({local_because or 'pooling'})"
    fields = forbidden_by(params, sent)
    if fields:
        named = " and ".join(f"`{name}`" for name in fields)
        return f"{named} {'depends' if len(fields) == 1 else 'depend'} on the tokens generated so far"
    if params.max_tokens is not None and params.max_tokens <= len(sent):
        return "all of its tokens have been sent"
    return ""


def continued_request(request: EngineCoreRequest, sent: Sequence[int]) -> EngineCoreRequest:
    """The client's request after the tokens `sent`. Only if `why_not_continued` says nothing."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None:
        raise ValueError(f"request {request.request_id} has no prompt tokens or no sampling parameters to go on with")
    rest = without_prompt_scores(params)
    if rest.max_tokens is not None:
        rest.max_tokens -= len(sent)
    rest.min_tokens = max(0, rest.min_tokens - len(sent))
    continued = copy(request)
    continued.prompt_token_ids = [*request.prompt_token_ids, *sent]
    continued.sampling_params = rest
    return continued
