"""The engine requests of each leg, built from the client's.

Relies on vLLM 0.32: `EngineCoreRequest` and `SamplingParams` (copying does not run `__post_init__`, decoding on the
worker does, so every leg must be valid by itself), `max_tokens` resolved by the input processor, stop strings left to
the detokenizer in the proxy, `kv_transfer_params` read from `sampling_params.extra_args`, `LoRARequest.lora_int_id`,
which is the same at every worker (`proxy.adapters`).
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from cluster.messages import RankAddress
from cluster.prefix_events.block_hashes import root
from proxy.adapters.adapter import BASE_MODEL
from proxy.legs.urgency import KEY, Urgency
from proxy.scheduling.first_token import decide_first_token
from proxy.scheduling.prompt_hashes import NO_HASHES, PromptHashes
from proxy.scheduling.view import RequestShape

FIELD = "kv_transfer_params"
PLACEHOLDER_TOKEN = 0
"""Stands in the decode worker's prompt until its connector knows token 1."""

Frames = Sequence[Any]


class ClientTransferParams(Exception):
    """A client tried to steer a hand-over, or an engine's order, itself."""


class Unsendable(Exception):
    """A request holds something that cannot be written into a message; a sentence for the client."""


def describe(request: EngineCoreRequest, engines_return_routed_experts: bool = False) -> RequestShape:
    """The shape of a client's request. Raises `ClientTransferParams`."""
    params = request.sampling_params
    extra_args = params.extra_args if params is not None else getattr(request.pooling_params, "extra_kwargs", None)
    ours = [name for name in (FIELD, KEY) if extra_args and name in extra_args]
    if ours:
        raise ClientTransferParams(
            f"{ours[0]} is set by the proxy for its own legs and is not accepted from clients; "
            "remove the field from the request"
        )
    num_prompt_tokens = len(request.prompt_token_ids or ())
    adapter = adapter_number(request)
    if params is None:
        return RequestShape(num_prompt_tokens, 1, False, local_because="pooling", adapter=adapter)
    return RequestShape(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=params.max_tokens or 1,
        first_token_mode=decide_first_token(params).first_token,
        wants_prompt_scores=_wants_prompt_scores(params),
        local_because=_local_because(request, engines_return_routed_experts),
        adapter=adapter,
        prompt_hashes=_prompt_hashes(request),
    )


def adapter_number(request: EngineCoreRequest) -> int:
    """Of the LoRA adapter that it wants, or `BASE_MODEL`."""
    return request.lora_request.lora_int_id if request.lora_request is not None else BASE_MODEL


def _prompt_hashes(request: EngineCoreRequest) -> PromptHashes:
    """None for what tokens alone do not tell apart, and for requests that read no cache."""
    params = request.sampling_params
    if request.mm_features or request.prompt_embeds is not None or params is None or params.skip_reading_prefix_cache:
        return NO_HASHES
    return PromptHashes(request.prompt_token_ids or (), root(adapter_number(request), request.cache_salt or ""))


def _local_because(request: EngineCoreRequest, engines_return_routed_experts: bool) -> str:
    if request.mm_features:
        return "multimodal input"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt embeddings"
    if request.resumable:
        return "streamed input"
    if engines_return_routed_experts:
        return "routed experts are returned for the whole request"
    return ""


def _wants_prompt_scores(params: SamplingParams) -> bool:
    return params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None


@dataclass(frozen=True, slots=True)
class Exporter:
    """Where the decode worker fetches from."""

    worker_id: str
    ranks: Sequence[RankAddress]


class LegRequests:
    """Builds and encodes the legs; raises `Unsendable`. One per event loop: vLLM's encoder is not thread-safe."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()

    def prefill(
        self, client: EngineCoreRequest, engine_request_id: str, transfer_id: str, first_token: bool, urgency: Urgency
    ) -> Frames:
        """The leg that computes the prompt and samples one token; in exact mode that token is dropped."""
        params = _own_params(client)
        leg = copy(params) if first_token else _prompt_only_params(params)
        leg.n = 1
        leg.max_tokens = 1
        transfer = {"mode": "export", "transfer_id": transfer_id, "decode_wants_first_token": first_token}
        _add_extra_args(leg, {FIELD: transfer, **urgency.extra_args()})
        return self._encode(client, engine_request_id, leg)

    def decode(
        self,
        client: EngineCoreRequest,
        engine_request_id: str,
        transfer_id: str,
        first_token: bool,
        exporter: Exporter,
        urgency: Urgency,
    ) -> Frames:
        """The leg that fetches the prompt's blocks and generates the rest."""
        leg = without_prompt_scores(_own_params(client))
        leg.n = 1
        ranks = [{"rank": r.rank, "address": r.address, "epoch": r.epoch} for r in exporter.ranks]
        transfer = {
            "mode": "import",
            "transfer_id": transfer_id,
            "first_token": first_token,
            "exporter": {"worker_id": exporter.worker_id, "ranks": ranks},
            "priority": urgency.priority,
        }
        _add_extra_args(leg, {FIELD: transfer, **urgency.extra_args()})
        if not first_token:
            return self._encode(client, engine_request_id, leg)
        if leg.max_tokens is not None:
            leg.max_tokens -= 1
        prompt = [*(client.prompt_token_ids or ()), PLACEHOLDER_TOKEN]
        return self._encode(client, engine_request_id, leg, prompt)

    def local(
        self, client: EngineCoreRequest, engine_request_id: str, urgency: Urgency, prompt_scores_known: bool = False
    ) -> Frames:
        """The leg that does everything. A sibling's prompt scores need not be computed again."""
        params = client.sampling_params
        if params is None:
            return self._encode(client, engine_request_id, params)
        leg = without_prompt_scores(params) if prompt_scores_known else copy(params)
        _add_extra_args(leg, urgency.extra_args())
        return self._encode(client, engine_request_id, leg)

    def _encode(
        self,
        client: EngineCoreRequest,
        engine_request_id: str,
        params: SamplingParams | None,
        prompt: list[int] | None = None,
    ) -> Frames:
        leg = copy(client)
        leg.request_id = engine_request_id
        leg.sampling_params = params
        if prompt is not None:
            leg.prompt_token_ids = prompt
        try:
            frames: Frames = self._encoder.encode(leg)
        except (OverflowError, RecursionError, TypeError, ValueError) as error:
            # vLLM checks what it knows of. What it misses is the fault of this one request.
            raise Unsendable(f"The request cannot be sent to a worker: {error}; change that value") from error
        return frames


def _own_params(client: EngineCoreRequest) -> SamplingParams:
    if client.sampling_params is None:
        raise ValueError(f"request {client.request_id} has no sampling parameters and cannot be handed over")
    return client.sampling_params


def _prompt_only_params(params: SamplingParams) -> SamplingParams:
    """Exact mode: nothing but the prompt's KV and scores is wanted, so sampling is as cheap as it can be."""
    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        watermarking=False,
        max_tokens=1,
        prompt_logprobs=params.prompt_logprobs,
        prompt_logprob_token_ids=params.prompt_logprob_token_ids,
        prompt_logprob_start=params.prompt_logprob_start,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
    )


def without_prompt_scores(params: SamplingParams) -> SamplingParams:
    """A copy that asks for no prompt logprobs."""
    leg = copy(params)
    leg.prompt_logprobs = None
    leg.prompt_logprob_token_ids = None
    leg.prompt_logprob_start = None
    # It was set because of the scores; without them cached blocks are as good as any.
    leg.skip_reading_prefix_cache = False
    return leg


def _add_extra_args(leg: SamplingParams, ours: Mapping[str, Any]) -> None:
    leg.extra_args = {**(leg.extra_args or {}), **ours}
