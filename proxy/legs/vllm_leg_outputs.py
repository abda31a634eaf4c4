"""What comes back from the legs, and how it is turned into the outputs of the client's one request.

Relies on vLLM 0.32: the fields of `EngineCoreOutput` (with `events` while the engine keeps statistics) and
`EngineCoreOutputs`, whose `timestamp` is of the same clock; `RequestState.is_prefilling` is cleared
by the first output, which must therefore carry the prefill's statistics and prompt logprobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import zmq
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder

from proxy.flights.events import Finish, LegKind, LegOutput


class BadOutputs(Exception):
    """Frames that are no `EngineCoreOutputs`."""


class OutputDecoder:
    """Decodes the frames that follow `cluster.messages.Outputs`."""

    def __init__(self) -> None:
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def decode(self, frames: Sequence[zmq.Frame]) -> EngineCoreOutputs:
        """Raises `BadOutputs` whatever is wrong with the frames: they come from a socket."""
        if not frames:
            raise BadOutputs("no frames")
        try:
            return cast(EngineCoreOutputs, self._decoder.decode(frames))
        except Exception as error:
            raise BadOutputs(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt logprobs and prefill statistics, computed once for all siblings of an `n > 1` request."""

    prompt_logprobs: Any
    prompt_token_id_logprobs: Any
    prefill_stats: PrefillStats | None


def leg_event(leg: LegKind, output: EngineCoreOutput) -> LegOutput:
    """An output as the flight sees it."""
    finish = str(output.finish_reason) if output.finish_reason is not None else None
    token = output.new_token_ids[0] if output.new_token_ids else None
    return LegOutput(leg, token, cast("Finish | None", finish), output)


def scheduled_ago_s(output: EngineCoreOutput, step_at_s: float) -> float | None:
    """Seconds from the moment a request was first scheduled to the end of the step at `step_at_s`.

    Both are times of the engine's clock, so the difference means the same everywhere. None: this output does not say.
    """
    for event in output.events or ():
        if event.type == EngineCoreEventType.SCHEDULED:
            return max(0.0, step_at_s - float(event.timestamp))
    return None


def prompt_scores(output: EngineCoreOutput) -> PromptScores:
    """What siblings need of the output that carried the prompt's scores."""
    return PromptScores(output.new_prompt_logprobs_tensors, output.prompt_token_id_logprobs, output.prefill_stats)


def found_tokens(leg: LegKind, output: EngineCoreOutput, prefill: EngineCoreOutput | None) -> int | None:
    """Prompt tokens that the worker which computed the prompt had cached; None if this output does not tell.

    `output` and `prefill` as for `client_output`, before that changes them.
    """
    if prefill is None and leg == "decode":
        return None
    stats = (prefill if prefill is not None else output).prefill_stats
    return stats.num_cached_tokens if stats is not None else None


def client_output(
    output: EngineCoreOutput,
    request_id: str,
    leg: LegKind,
    finished: bool,
    prefill: EngineCoreOutput | None,
    continues: bool = False,
) -> EngineCoreOutput:
    """The output as the client's request sees it. Changes and returns `output`, which nobody else keeps.

    Args:
        output: one step of a leg.
        request_id: the client's request in vLLM's front end.
        leg: where it comes from.
        finished: the request ends with it; else the leg's own finish reason is the proxy's doing.
        prefill: exact mode: the dropped prefill output, whose prompt scores and statistics belong to this one.
        continues: the client has had the beginning from other workers, and the prompt's statistics with it.
    """
    output.request_id = request_id
    output.kv_transfer_params = None
    if leg == "prefill" and not finished:
        output.finish_reason = None
        output.stop_reason = None
    if leg == "decode" or continues:
        # Queueing and prefill were the prefill worker's; here only preemption means anything to the client.
        output.prefill_stats = None
        output.events = [e for e in output.events or () if e.type == EngineCoreEventType.PREEMPTED] or None
        if prefill is not None:
            output.prefill_stats = prefill.prefill_stats
            output.new_prompt_logprobs_tensors = prefill.new_prompt_logprobs_tensors
            output.prompt_token_id_logprobs = prefill.prompt_token_id_logprobs
            output.events = [*(prefill.events or ()), *(output.events or ())] or None
    return output


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether an output has nothing but tokens and what belongs to them."""
    return output.finish_reason is None and not output.events and output.prefill_stats is None


def passed_on(output: EngineCoreOutput, request_id: str) -> EngineCoreOutput:
    """What `client_output` makes of a plain output in the middle of a stream."""
    output.request_id = request_id
    output.kv_transfer_params = None
    return output


def add_prompt_scores(output: EngineCoreOutput, scores: PromptScores) -> None:
    """Puts the leader's prompt scores into a sibling's first output."""
    output.new_prompt_logprobs_tensors = scores.prompt_logprobs
    output.prompt_token_id_logprobs = scores.prompt_token_id_logprobs
    output.prefill_stats = scores.prefill_stats


def batch(engine_index: int, outputs: list[EngineCoreOutput], step: EngineCoreOutputs | None) -> EngineCoreOutputs:
    """One engine step for vLLM's front end: our outputs, the step's statistics and clock."""
    if step is None:
        return EngineCoreOutputs(engine_index=engine_index, outputs=outputs)
    if step.scheduler_stats is not None:
        # The front end has no connector configured that could read these.
        step.scheduler_stats.kv_connector_stats = None
    return EngineCoreOutputs(
        engine_index=engine_index,
        outputs=outputs,
        scheduler_stats=step.scheduler_stats,
        timestamp=step.timestamp,
        weight_version=step.weight_version,
    )
