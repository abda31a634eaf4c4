"""The frames of `EngineCoreRequest` and `EngineCoreOutputs`, read and written without vLLM.

Importing vLLM costs a process many seconds, and a simulated worker needs ten fields of a request. Relies on the layout
that vLLM 0.32's `MsgpackEncoder` gives these classes: `EngineCoreRequest`, `EngineCoreOutput(s)` as arrays in the order
of their fields, `SamplingParams`, `PrefillStats`, `SchedulerStats` and `EngineCoreEvent` as maps, defaults left out,
arrays and tensors as (dtype, shape, extension 3). `tests/unit/cluster/simulated/test_vllm_frames.py` sends both ways
through vLLM's own classes and fails when these move.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

_RAW_VIEW = 3


class Finish(IntEnum):
    """vLLM's `FinishReason`."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class Sampling(msgspec.Struct, omit_defaults=True):
    """The part of `SamplingParams` that a simulated engine honours."""

    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None


class Request(msgspec.Struct, array_like=True, omit_defaults=True):
    """`EngineCoreRequest`. What follows is not read."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: Sampling | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0


def adapter_of(request: Request) -> int:
    """Number of the LoRA adapter, 0 for the base model; `LoRARequest` is an array of name, number, path and more."""
    match request.lora_request:
        case [str(), int(number), *_]:
            return number
    return 0


class EngineEvent(msgspec.Struct):
    """`EngineCoreEvent`: type 1 is queued, 2 scheduled, 3 preempted. Seconds of the machine's monotonic clock."""

    type: int
    timestamp: float


class PrefillStats(msgspec.Struct):
    """Tokens of a prompt by where their KV came from."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class PrefixCacheStats(msgspec.Struct):
    """Tokens looked up in the prefix cache, and found, since the last report."""

    requests: int = 0
    queries: int = 0
    hits: int = 0


class SchedulerStats(msgspec.Struct):
    """State of the scheduler after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)


class Output(msgspec.Struct, array_like=True, omit_defaults=True):
    """`EngineCoreOutput`, up to the last field that is ever set here."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | None = None
    events: list[EngineEvent] | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: PrefillStats | None = None


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """`EngineCoreOutputs`: one step."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0


class RequestUnreadable(Exception):
    """The frames are not an `EngineCoreRequest` of this vLLM version."""


_requests = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()


def read_request(frames: Sequence[bytes]) -> Request:
    """The request that follows a `Submit`; raises `RequestUnreadable`."""
    try:
        return _requests.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise RequestUnreadable(f"not a request of this vLLM version: {error}") from error


def outputs_frames(outputs: Outputs) -> list[bytes]:
    """What follows an `Outputs` message."""
    return [_encoder.encode(outputs)]


def logprobs_rows(token_ids: "np.ndarray[Any, Any]", as_tensors: bool) -> Any:
    """`LogprobsLists` (arrays) or `LogprobsTensors` of these tokens, each row falling from its first token on.

    Args:
        token_ids: [position, 1 + k]; the first column is the token that stands there, the rest are the most likely.
        as_tensors: whether dtypes are named as torch names them.
    """
    num_rows, num_columns = token_ids.shape
    falling = -0.25 - np.abs(np.arange(num_columns, dtype=np.float32) - 1)
    falling[0] = -0.25  # the most likely is the one that was sampled
    fields = (
        token_ids.astype(np.int64),
        np.broadcast_to(falling, token_ids.shape).copy(),
        np.ones(num_rows, dtype=np.int64),
    )
    return [*(_array(field, as_tensors) for field in fields), None]


def _array(array: "np.ndarray[Any, Any]", as_tensor: bool) -> Any:
    dtype = array.dtype.name if as_tensor else array.dtype.str
    return [dtype, list(array.shape), msgspec.msgpack.Ext(_RAW_VIEW, array.tobytes())]
