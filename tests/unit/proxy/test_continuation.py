"""What can go on at another worker: every field of vLLM's has been decided on, and what is left is right."""

from typing import Any

import msgspec
import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from proxy.legs.vllm_continuation import continued_request, why_not_continued
from proxy.scheduling.continuation import CONTINUATION_RULES, forbidden_by

SENT = [7, 8, 9]

FORBID: list[tuple[str, dict[str, Any]]] = [
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": -0.5}),
    ("seed", {"seed": 7, "temperature": 0.8}),
    ("structured_outputs", {"structured_outputs": StructuredOutputsParams(regex="a+")}),
    ("bad_words", {"bad_words": ["not tokenized yet"]}),
    ("thinking_token_budget", {"thinking_token_budget": 5}),
    ("repetition_detection", {"repetition_detection": RepetitionDetectionParams(4, 1, 3)}),
    ("trace_decode_token_ids", {"trace_decode_token_ids": [1, 2]}),
    ("watermarking", {"watermarking": True}),
    ("extra_args", {"extra_args": {"my_plugin": 1}}),
]

ALLOW: list[dict[str, Any]] = [
    {"temperature": 1.3, "top_p": 0.5, "top_k": 10, "min_p": 0.1},
    {"seed": 7, "temperature": 0.0},
    {"repetition_penalty": 1.2},
    {"min_tokens": 5, "stop": ["x"], "stop_token_ids": [5], "ignore_eos": True},
    {"logprobs": 3, "prompt_logprobs": 2, "flat_logprobs": True},
    {"logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4], "bad_words": []},
    {"presence_penalty": 0.0, "watermarking": False, "thinking_token_budget": -1},
    {"n": 3, "temperature": 1.0, "extra_args": {"kv_transfer_params": {}}},
]

KEPT = {
    "request_id", "mm_features", "pooling_params", "arrival_time", "lora_request", "cache_salt", "data_parallel_rank",
    "prompt_embeds", "prompt_is_token_ids", "client_index", "current_wave", "priority", "trace_headers", "resumable",
    "external_req_id", "reasoning_ended", "reasoning_parser_kwargs", "abort_immediately", "session_id", "kv_hints",
}  # fmt: skip


def request(**values: Any) -> EngineCoreRequest:
    params = SamplingParams(**{"max_tokens": 10, **values})
    return EngineCoreRequest("r", [1, 2, 3], None, params, None, 5.0, None, "salt", None, priority=4)


def test_every_field_of_vllms_sampling_params_has_been_decided_on() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields - set(CONTINUATION_RULES) == set(), "new fields in this vLLM: decide whether they allow to go on"
    assert set(CONTINUATION_RULES) - fields == set(), "fields that this vLLM does not have any more"


def test_every_field_of_vllms_requests_has_been_decided_on() -> None:
    fields = {field.name for field in msgspec.structs.fields(EngineCoreRequest)}
    assert fields == KEPT | {"prompt_token_ids", "sampling_params"}


@pytest.mark.parametrize(("name", "values"), FORBID, ids=[name for name, _ in FORBID])
def test_what_looks_back_at_generated_tokens_forbids_to_go_on(name: str, values: dict[str, Any]) -> None:
    assert forbidden_by(SamplingParams(**values), SENT) == (name,)
    assert f"`{name}` depends on" in why_not_continued(request(**values), SENT, "")


@pytest.mark.parametrize("values", ALLOW, ids=[",".join(values) for values in ALLOW])
def test_everything_else_can_go_on(values: dict[str, Any]) -> None:
    assert why_not_continued(request(**values), SENT, "") == ""


def test_every_rule_that_can_forbid_is_tested() -> None:
    forbidding = {name for name, rule in CONTINUATION_RULES.items() if rule.__name__ != "_never"}
    assert forbidding == {name for name, _ in FORBID}


@pytest.mark.parametrize(
    ("word", "forbids"),
    [
        ([5], False),
        ([9], False),
        ([9, 5], True),
        ([8, 9, 5], True),
        ([8, 5], False),
        ([7, 8, 9], False),
        ([4, 9, 5], False),
    ],
)
def test_a_bad_word_forbids_only_if_it_has_begun_in_what_was_sent(word: list[int], forbids: bool) -> None:
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [word]
    assert bool(forbidden_by(params, SENT)) == forbids


def test_several_parameters_are_all_named() -> None:
    why_not = why_not_continued(request(presence_penalty=1.0, frequency_penalty=1.0), SENT, "")
    assert why_not.startswith("`presence_penalty` and `frequency_penalty` depend on")


def test_requests_that_cannot_move_cannot_go_on_elsewhere() -> None:
    assert "multimodal input" in why_not_continued(request(), SENT, "multimodal input")
    assert "pooling" in why_not_continued(EngineCoreRequest("r", [1], None, None, None, 5.0, None, None, None), [], "")


def test_what_was_sent_becomes_prompt_and_is_not_counted_twice() -> None:
    client = request(min_tokens=5, prompt_logprobs=2)
    rest = continued_request(client, SENT)
    assert rest.prompt_token_ids == [1, 2, 3, *SENT]
    assert (rest.sampling_params.max_tokens, rest.sampling_params.min_tokens) == (7, 2)
    assert rest.sampling_params.prompt_logprobs is None
    assert rest.sampling_params.skip_reading_prefix_cache is False
    assert all(getattr(rest, name) == getattr(client, name) for name in KEPT)
    assert (client.prompt_token_ids, client.sampling_params.max_tokens) == ([1, 2, 3], 10), "the client's is untouched"
    assert continued_request(client, range(8)).sampling_params.min_tokens == 0


def test_nothing_is_left_when_every_token_was_sent() -> None:
    assert "have been sent" in why_not_continued(request(max_tokens=3), SENT, "")
