"""First-token mode or exact mode: every sampling parameter of the installed vLLM has been decided on."""

from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

from proxy.scheduling.first_token import RULES, decide_first_token

REMEMBERS: list[tuple[str, dict[str, Any]]] = [
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": -0.5}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("seed", {"seed": 7, "temperature": 0.8}),
    ("min_tokens", {"min_tokens": 1}),
    ("structured_outputs", {"structured_outputs": StructuredOutputsParams(regex="a+")}),
    ("bad_words", {"bad_words": ["no way"]}),
    ("thinking_token_budget", {"thinking_token_budget": 5}),
    ("repetition_detection", {"repetition_detection": RepetitionDetectionParams(4, 1, 3)}),
    ("trace_decode_token_ids", {"trace_decode_token_ids": [1, 2]}),
    ("watermarking", {"watermarking": True}),
    ("extra_args", {"extra_args": {"my_plugin": 1}}),
]

FORGETS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.5, "top_k": 10, "min_p": 0.1},
    {"seed": 7, "temperature": 0.0},
    {"stop": ["x"], "stop_token_ids": [5], "ignore_eos": True},
    {"logprobs": 3, "prompt_logprobs": 2, "flat_logprobs": True},
    {"prompt_logprob_token_ids": np.array([[1]]), "prompt_logprob_start": 0},
    {"logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4]},
    {"n": 3, "max_tokens": 5, "temperature": 1.0},
    {"output_kind": RequestOutputKind.DELTA, "stream_interval": 4},
    {"repetition_penalty": 1.0, "presence_penalty": 0.0, "watermarking": False, "bad_words": []},
    {"thinking_token_budget": -1},
    {"extra_args": {"kv_transfer_params": {}}},
]


def test_every_field_of_vllms_sampling_params_has_been_decided_on() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields - set(RULES) == set(), "new fields in this vLLM: decide whether each remembers output"
    assert set(RULES) - fields == set(), "fields that this vLLM does not have any more"


@pytest.mark.parametrize(("name", "values"), REMEMBERS, ids=[name for name, _ in REMEMBERS])
def test_sampling_that_remembers_output_is_exact(name: str, values: dict[str, Any]) -> None:
    mode = decide_first_token(SamplingParams(**values))
    assert not mode.first_token
    assert mode.because == (name,)


@pytest.mark.parametrize("values", FORGETS, ids=[",".join(values) for values in FORGETS])
def test_sampling_without_memory_takes_the_first_token_from_the_prefill_worker(values: dict[str, Any]) -> None:
    assert decide_first_token(SamplingParams(**values)).first_token


def test_every_rule_that_can_force_exact_mode_is_tested() -> None:
    tested = {name for name, _ in REMEMBERS} | {"_bad_words_token_ids"}
    forcing = {name for name, rule in RULES.items() if rule.__name__ != "_never"}
    assert forcing == tested


def test_bad_words_already_tokenized_are_exact_too() -> None:
    params = SamplingParams()
    params._bad_words_token_ids = [[1, 2]]
    assert decide_first_token(params).because == ("_bad_words_token_ids",)
