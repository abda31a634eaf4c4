"""Whether token 1 may come from the prefill worker.

In *first-token mode* the decode worker gets `prompt + [token 1]` as its prompt. That is exact only if sampling has
no memory of its own output, because there token 1 counts as prompt. Otherwise *exact mode* is used: the decode
worker gets the prompt alone, recomputes its last token and samples token 1 itself.

`RULES` names every field of vLLM 0.32's `SamplingParams`; a test fails when vLLM adds one. The parameters are read by
attribute, so nothing here imports vLLM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Rule = Callable[[Any, Any], bool]
"""(value of the field, all parameters) -> True if exact mode is needed."""


def _never(_value: Any, _params: Any) -> bool:
    return False


def _not_zero(value: Any, _params: Any) -> bool:
    return bool(value)


def _not_one(value: Any, _params: Any) -> bool:
    return bool(value != 1.0)


def _is_set(value: Any, _params: Any) -> bool:
    return value is not None


def _seed(value: Any, params: Any) -> bool:
    # The generator's state after token 1 lives on the prefill worker. Greedy sampling draws nothing.
    return value is not None and params.temperature > 0.0


def _extra_args(value: Any, _params: Any) -> bool:
    # Plugins' logits processors read them; they may well remember output.
    return bool(set(value or ()) - {"kv_transfer_params"})


RULES: Mapping[str, Rule] = {
    # Sampling that counts or draws from what was generated.
    "presence_penalty": _not_zero,
    "frequency_penalty": _not_zero,
    "repetition_penalty": _not_one,
    "seed": _seed,
    "min_tokens": _not_zero,
    "structured_outputs": _is_set,
    "bad_words": _not_zero,  # a bad word of several tokens is matched against generated tokens only
    "_bad_words_token_ids": _not_zero,
    "thinking_token_budget": _is_set,
    "repetition_detection": _is_set,
    "trace_decode_token_ids": _is_set,
    "watermarking": _not_zero,  # hashes a window of previous output
    "extra_args": _extra_args,
    # The same at every position: temperature alone draws afresh, the rest look at the current logits only.
    "temperature": _never,
    "top_p": _never,
    "top_k": _never,
    "min_p": _never,
    "logit_bias": _never,
    "allowed_token_ids": _never,
    "stop_token_ids": _never,
    "ignore_eos": _never,
    "_eos_token_id": _never,
    "_all_stop_token_ids": _never,
    # Counted by whoever builds the legs: each leg gets its own.
    "n": _never,
    "max_tokens": _never,
    "skip_reading_prefix_cache": _never,
    # Computed on the prefill worker, once.
    "prompt_logprobs": _never,
    "prompt_logprob_token_ids": _never,
    "prompt_logprob_start": _never,
    # Per position, from whoever sampled it.
    "logprobs": _never,
    "logprob_token_ids": _never,
    "flat_logprobs": _never,
    # Text is made in the proxy, in one place, from the merged tokens.
    "stop": _never,
    "detokenize": _never,
    "skip_special_tokens": _never,
    "spaces_between_special_tokens": _never,
    "include_stop_str_in_output": _never,
    "output_kind": _never,
    "stream_interval": _never,
    "output_text_buffer_length": _never,
    "skip_clone": _never,
    "_watermarking_skipped": _never,
    "routed_experts_prompt_start": _never,  # such engines do not hand over, see `vllm_leg_requests`
}


@dataclass(frozen=True, slots=True)
class FirstTokenMode:
    """The decision and the fields that forced exact mode."""

    first_token: bool
    because: tuple[str, ...]


def decide_first_token(params: Any) -> FirstTokenMode:
    """First-token mode unless a field of `params` (a vLLM `SamplingParams`) has memory of the output."""
    because = tuple(name for name, needs_exact in RULES.items() if needs_exact(getattr(params, name), params))
    return FirstTokenMode(not because, because)
