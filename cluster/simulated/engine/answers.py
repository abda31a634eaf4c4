"""What a simulated engine says about a token: finish reason, scores and statistics, as vLLM's scheduler would. Pure."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from cluster.simulated.engine.sequence import Sequence
from cluster.simulated.engine.vllm_frames import EngineEvent, Finish, Output, PrefillStats, logprobs_rows

_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3
_ALL_SCORES = 20
"""Entries given to those who ask for the scores of the whole vocabulary."""


def finish_of(sequence: Sequence, token: int, max_model_len: int) -> Finish | None:
    """Whether the token that was just appended is the last one; the order of the checks is vLLM's."""
    sampling = sequence.sampling
    if token == sampling.eos_token_id or token in (sampling.stop_token_ids or ()):
        return Finish.STOP
    if len(sequence.tokens) >= max_model_len or sequence.num_output >= (sampling.max_tokens or 1):
        return Finish.LENGTH
    return None


def output_of(sequence: Sequence, token: int, finish: Finish | None, now_s: float, words: Seq[int]) -> Output:
    """The output of one step. The first one says how the prompt was computed."""
    output = Output(sequence.request_id, [token], finish_reason=finish)
    sampling = sequence.sampling
    if finish is Finish.STOP and token != sampling.eos_token_id:
        output.stop_reason = token
    if sampling.logprobs is not None:
        output.new_logprobs = _scores([token], sampling.logprobs, words, as_tensors=False)
    if sequence.stats_told:
        return output
    sequence.stats_told = True
    output.events = [
        EngineEvent(_QUEUED, sequence.arrived_s),
        EngineEvent(_SCHEDULED, sequence.scheduled_s or now_s),
        *(EngineEvent(_PREEMPTED, now_s) for _ in range(sequence.num_preempted)),
    ]
    num_known = sequence.num_cached + sequence.num_imported
    output.prefill_stats = PrefillStats(
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_prompt_tokens - num_known,
        num_cached_tokens=num_known,
        num_local_cached_tokens=sequence.num_cached,
        num_external_cached_tokens=sequence.num_imported,
    )
    if sampling.prompt_logprobs is not None:
        first = (sampling.prompt_logprob_start or 0) + 1
        prompt = sequence.tokens[first : sequence.num_prompt_tokens]
        output.new_prompt_logprobs_tensors = _scores(prompt, sampling.prompt_logprobs, words, as_tensors=True)
    return output


def _scores(tokens: Seq[int], num_scores: int, words: Seq[int], as_tensors: bool) -> Any:
    """Scores of these tokens in their positions: each is the most likely one, followed by other words."""
    num_scores = min(_ALL_SCORES if num_scores < 0 else num_scores, len(words))
    rows = [
        [token, *([token, *(word for word in words[:num_scores] if word != token)][:num_scores])] for token in tokens
    ]
    shape = (len(tokens), 1 + num_scores)
    return logprobs_rows(np.asarray(rows, dtype=np.int64).reshape(shape), as_tensors)
