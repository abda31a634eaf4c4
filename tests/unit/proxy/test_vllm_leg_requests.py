"""The legs' requests: valid by themselves on the wire, and never a change to the client's own."""

import itertools
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from cluster.messages import RankAddress
from prefill.urgency import read_urgency
from proxy.legs.urgency import Urgency, urgency_of
from proxy.legs.vllm_leg_requests import ClientTransferParams, Exporter, LegRequests, describe
from proxy.scheduling.slo import SloClass, Standing

PROMPT = [5, 6, 7, 8]
EXPORTER = Exporter("prefill-0", [RankAddress(0, "ipc://a", "life"), RankAddress(1, "ipc://b", "life")])


URGENCY = Urgency(ttft_left_s=-0.5, priority=2, itl_s=0.2)


def client(pooling: PoolingParams | None = None, **values: Any) -> EngineCoreRequest:
    params = None if pooling is not None else SamplingParams(**{"max_tokens": 8, **values})
    return EngineCoreRequest(
        request_id="client",
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=params,
        pooling_params=pooling,
        arrival_time=1.0,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
        priority=3,
        external_req_id="label",
    )


def decoded(frames: Any) -> EngineCoreRequest:
    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(frames)
    return request


def transfer(request: EngineCoreRequest) -> dict[str, Any]:
    params = request.sampling_params
    assert params is not None
    assert params.extra_args is not None
    found: dict[str, Any] = params.extra_args["kv_transfer_params"]
    return found


ALL_KINDS: list[dict[str, Any]] = [
    {},
    {"min_tokens": 4},
    {"min_tokens": 8},
    {"n": 1, "seed": 3, "temperature": 0.7},
    {"logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.4},
    {"stop": ["x"], "stop_token_ids": [4], "ignore_eos": True},
    {"prompt_logprob_token_ids": np.array([[1], [2], [3]], dtype=np.int32), "prompt_logprob_start": 0},
    {"extra_args": {"plugin": 1}},
    {"output_kind": RequestOutputKind.FINAL_ONLY, "max_tokens": 2},
]


@pytest.mark.parametrize("values", ALL_KINDS, ids=[",".join(values) or "plain" for values in ALL_KINDS])
def test_every_leg_is_valid_where_it_arrives_and_the_clients_request_is_unchanged(values: dict[str, Any]) -> None:
    request = client(**values)
    before = [bytes(frame) for frame in MsgpackEncoder().encode(request)]
    shape = describe(request)
    legs = LegRequests()
    prefill = decoded(legs.prefill(request, "leg-p", "t", shape.first_token_mode, URGENCY))
    decode = decoded(legs.decode(request, "leg-d", "t", shape.first_token_mode, EXPORTER, URGENCY))
    local = decoded(legs.local(request, "leg-l", URGENCY))
    assert [leg.request_id for leg in (prefill, decode, local)] == ["leg-p", "leg-d", "leg-l"]
    assert prefill.prompt_token_ids == local.prompt_token_ids == PROMPT
    assert all(leg.cache_salt == "salt" and leg.priority == 3 for leg in (prefill, decode, local))
    assert prefill.sampling_params is not None
    assert (prefill.sampling_params.max_tokens, prefill.sampling_params.n) == (1, 1)
    assert [bytes(frame) for frame in MsgpackEncoder().encode(request)] == before


GRID = [
    dict(zip(("n", "output_kind", "logprobs", "max_tokens", "stop", "min_tokens"), values, strict=True))
    for values in itertools.product(
        (1, 3),
        (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY),
        (None, 0, 5),
        (None, 1, 2, 64),
        (None, ["first"], ["spans two"], ["never"]),
        (0, 1, 5),
    )
    if values[-1] <= (values[3] or 64)
]


def test_whatever_is_combined_the_legs_together_are_the_clients_request() -> None:
    """The grid of the OpenAI API's limits: what each leg may generate, score and stop at."""
    assert len(GRID) > 400
    legs = LegRequests()
    for values in GRID:
        request = client(**values)
        shape = describe(request)
        asked = request.sampling_params
        p = decoded(legs.prefill(request, "p", "t", shape.first_token_mode, URGENCY)).sampling_params
        if shape.first_token_mode and values["max_tokens"] == 1:
            continue  # the prefill worker's token is the answer, see `scheduling.route`
        decode = decoded(legs.decode(request, "d", "t", shape.first_token_mode, EXPORTER, URGENCY))
        d = decode.sampling_params
        assert asked is not None
        assert p is not None
        assert d is not None
        assert (p.n, p.max_tokens, d.n) == (1, 1, 1), values
        assert shape.first_token_mode == (values["min_tokens"] == 0), values
        handed_over = int(shape.first_token_mode)
        assert d.max_tokens == (None if asked.max_tokens is None else asked.max_tokens - handed_over), values
        assert d.min_tokens == asked.min_tokens, "only without min_tokens is a token handed over"
        assert (d.logprobs, d.stop, d.output_kind) == (asked.logprobs, asked.stop, asked.output_kind), values
        if handed_over:
            assert (p.logprobs, p.stop, p.min_tokens) == (asked.logprobs, asked.stop, 0), values
        assert decode.prompt_token_ids == PROMPT + [0] * handed_over, values


def test_in_first_token_mode_the_decode_leg_has_a_placeholder_and_one_token_less() -> None:
    leg = decoded(LegRequests().decode(client(), "leg", "t", True, EXPORTER, URGENCY))
    assert leg.prompt_token_ids == [*PROMPT, 0]
    assert leg.sampling_params is not None
    assert leg.sampling_params.max_tokens == 7
    assert transfer(leg) == {
        "mode": "import",
        "transfer_id": "t",
        "first_token": True,
        "exporter": {
            "worker_id": "prefill-0",
            "ranks": [
                {"rank": 0, "address": "ipc://a", "epoch": "life"},
                {"rank": 1, "address": "ipc://b", "epoch": "life"},
            ],
        },
        "priority": 2,
    }


def test_in_first_token_mode_the_prefill_leg_samples_as_the_client_asked() -> None:
    request = client(temperature=0.5, top_p=0.9, logprobs=3, stop_token_ids=[9], ignore_eos=True, logit_bias={1: 2.0})
    params = decoded(LegRequests().prefill(request, "leg", "t", True, URGENCY)).sampling_params
    assert params is not None
    assert (params.temperature, params.top_p, params.logprobs, params.stop_token_ids) == (0.5, 0.9, 3, [9])
    assert params.ignore_eos
    assert params.logit_bias == {1: 2.0}


def test_in_exact_mode_the_prefill_leg_only_computes_the_prompt() -> None:
    request = client(presence_penalty=1.0, seed=3, min_tokens=5, prompt_logprobs=2, logprobs=4)
    leg = decoded(LegRequests().prefill(request, "leg", "t", False, URGENCY))
    params = leg.sampling_params
    assert params is not None
    assert (params.presence_penalty, params.seed, params.min_tokens, params.logprobs) == (0.0, None, 0, None)
    assert params.prompt_logprobs == 2
    assert params.skip_reading_prefix_cache
    assert transfer(leg) == {"mode": "export", "transfer_id": "t", "decode_wants_first_token": False}


def test_prompt_scores_stay_on_the_prefill_leg() -> None:
    request = client(prompt_logprobs=2)
    decode = decoded(LegRequests().decode(request, "leg", "t", True, EXPORTER, URGENCY)).sampling_params
    follower = decoded(LegRequests().local(request, "leg", URGENCY, prompt_scores_known=True)).sampling_params
    alone = decoded(LegRequests().local(request, "leg", URGENCY)).sampling_params
    assert decode is not None
    assert follower is not None
    assert alone is not None
    assert decode.prompt_logprobs is None
    assert not decode.skip_reading_prefix_cache
    assert follower.prompt_logprobs is None
    assert alone.prompt_logprobs == 2
    assert alone.skip_reading_prefix_cache


def test_other_extra_arguments_reach_both_legs() -> None:
    request = client(extra_args={"plugin": 1})
    leg = decoded(LegRequests().decode(request, "leg", "t", False, EXPORTER, URGENCY))
    assert leg.sampling_params is not None
    assert leg.sampling_params.extra_args is not None
    assert leg.sampling_params.extra_args["plugin"] == 1
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == {"plugin": 1}


def test_every_leg_tells_its_engine_how_urgent_it_is() -> None:
    request, legs = client(), LegRequests()
    prefill = decoded(legs.prefill(request, "leg", "t", True, URGENCY))
    decode = decoded(legs.decode(request, "leg", "t", True, EXPORTER, URGENCY))
    local = decoded(legs.local(request, "leg", URGENCY))
    for leg in (prefill, decode, local):
        assert leg.sampling_params is not None
        heard = read_urgency(leg.sampling_params.extra_args, arrival_s=100.0, priority=9)
        assert (heard.deadline_s, heard.priority, heard.itl_s) == (99.5, 2, 0.2)
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args is None


def test_a_deadline_counts_from_the_arrival_at_the_proxy() -> None:
    standing = Standing(SloClass(ttft_s=3.0, itl_s=0.1), priority=1)
    assert urgency_of(standing, arrived_s=10.0, now_s=14.5) == Urgency(-1.5, 1, 0.1)


def test_an_engine_is_told_how_long_its_steps_may_be_for_stricter_classes() -> None:
    standing = Standing(SloClass(ttft_s=8.0, longest_step_s=0.5))
    said = urgency_of(standing, arrived_s=10.0, now_s=12.0).extra_args()
    assert read_urgency(said, arrival_s=100.0, priority=0).longest_step_s == 0.5
    assert read_urgency(URGENCY.extra_args(), arrival_s=100.0, priority=0).longest_step_s == inf


@pytest.mark.parametrize("field", ["kv_transfer_params", "twinpool"])
def test_a_client_cannot_steer_a_handover_or_an_engine(field: str) -> None:
    with pytest.raises(ClientTransferParams, match=f"{field} is set by the proxy"):
        describe(client(extra_args={field: {"mode": "import"}}))


def test_what_cannot_be_handed_over_says_why() -> None:
    pooled = describe(client(pooling=PoolingParams()))
    streamed = describe(msgspec.structs.replace(client(), resumable=True))
    embedded = describe(msgspec.structs.replace(client(), prompt_token_ids=None))
    assert pooled.local_because == "pooling"
    assert streamed.local_because == "streamed input"
    assert embedded.local_because == "prompt embeddings"
    assert describe(client(), engines_return_routed_experts=True).local_because
    assert describe(client()).local_because == ""


def test_the_shape_tells_mode_length_and_scores() -> None:
    shape = describe(client(max_tokens=1, prompt_logprobs=0))
    assert (shape.num_prompt_tokens, shape.max_tokens) == (4, 1)
    assert shape.first_token_mode
    assert shape.wants_prompt_scores
    assert not describe(client(frequency_penalty=0.1)).first_token_mode
