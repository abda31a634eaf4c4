"""Whether a stream whose worker is lost can go on at other workers, with the tokens already sent as part of its prompt.

That is exact only if sampling makes no difference between prompt and output, or if what it counts can be corrected in
the new request. `CONTINUATION_RULES` names every field of vLLM 0.32's `SamplingParams`; a test fails when vLLM adds
one. The parameters are read by attribute, so nothing here imports vLLM. `first_token.RULES` answers the same question
for a single token that another worker sampled; it may be stricter, because there exact mode is the way out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

ForbiddenBy = Callable[[Any, Any, Sequence[int]], bool]
"""(value of the field, all parameters, tokens sent) -> True if no other worker can go on as this one would have."""


def _never(_value: Any, _params: Any, _sent: Sequence[int]) -> bool:
    return False


def _not_zero(value: Any, _params: Any, _sent: Sequence[int]) -> bool:
    return bool(value)


def _is_set(value: Any, _params: Any, _sent: Sequence[int]) -> bool:
    return value is not None


def _seed(value: Any, params: Any, _sent: Sequence[int]) -> bool:
    # The generator has drawn once per token and its state is lost. Greedy sampling draws nothing.
    return value is not None and params.temperature > 0.0


def _bad_words(value: Any, params: Any, sent: Sequence[int]) -> bool:
    """A bad word of several tokens is found in generated tokens only: one must not have begun in those sent."""
    if not value:
        return False
    words = params._bad_words_token_ids
    if words is None:
        return True
    return any(list(sent[-length:]) == list(word[:length]) for word in words for length in range(1, len(word)))


def _extra_args(value: Any, _params: Any, _sent: Sequence[int]) -> bool:
    # Plugins' logits processors read them; they may well remember output.
    return bool(set(value or ()) - {"kv_transfer_params"})


CONTINUATION_RULES: Mapping[str, ForbiddenBy] = {
    # What looks back at generated tokens, and only at these.
    "presence_penalty": _not_zero,
    "frequency_penalty": _not_zero,
    "seed": _seed,
    "structured_outputs": _is_set,
    "bad_words": _bad_words,
    "thinking_token_budget": _is_set,
    "repetition_detection": _is_set,
    "trace_decode_token_ids": _is_set,
    "watermarking": _not_zero,
    "extra_args": _extra_args,
    # Looks at the prompt as well as at the output.
    "repetition_penalty": _never,
    # The same at every position.
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
    "_bad_words_token_ids": _never,  # see `bad_words`
    # Corrected in the new request, see `legs.vllm_continuation`.
    "max_tokens": _never,
    "min_tokens": _never,
    "prompt_logprobs": _never,
    "prompt_logprob_token_ids": _never,
    "prompt_logprob_start": _never,
    "skip_reading_prefix_cache": _never,
    # Per position, from whoever sampled it.
    "logprobs": _never,
    "logprob_token_ids": _never,
    "flat_logprobs": _never,
    # Made or kept in the proxy, whose state outlives the worker.
    "n": _never,
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


def forbidden_by(params: Any, sent: Sequence[int]) -> tuple[str, ...]:
    """Fields of `params` (a vLLM `SamplingParams`) for which no other worker can go on after the tokens `sent`."""
    return tuple(
        name for name, forbidden in CONTINUATION_RULES.items() if forbidden(getattr(params, name), params, sent)
    )
