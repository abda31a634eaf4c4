"""Our reading and writing of vLLM's frames against vLLM's own classes."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics import stats as vllm_stats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from cluster.simulated.engine import vllm_frames as ours


def names(struct: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(struct)]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(ours.Request, EngineCoreRequest), (ours.Output, EngineCoreOutput), (ours.Outputs, EngineCoreOutputs)],
)
def test_fields_sent_by_position_stand_where_vllm_has_them(mine: Any, theirs: Any) -> None:
    assert names(mine) == names(theirs)[: len(names(mine))]
    defaults = {f.encode_name: f.default for f in msgspec.structs.fields(theirs) if isinstance(f.default, int | str)}
    for field in msgspec.structs.fields(mine):
        assert not isinstance(field.default, int | str) or defaults[field.encode_name] == field.default


def test_fields_sent_by_name_have_vllms_names_and_defaults() -> None:
    theirs = {field.encode_name: field.default for field in msgspec.structs.fields(SamplingParams)}
    for field in msgspec.structs.fields(ours.Sampling):
        assert theirs[field.encode_name] == field.default, field.encode_name
    for mine, reference in (
        (ours.SchedulerStats, vllm_stats.SchedulerStats),
        (ours.PrefillStats, vllm_stats.PrefillStats),
        (ours.PrefixCacheStats, vllm_stats.PrefixCacheStats),
    ):
        assert set(names(mine)) <= {field.name for field in dataclasses.fields(reference)}
    assert names(ours.EngineEvent) == names(EngineCoreEvent)


def test_finish_reasons_and_events_have_vllms_numbers() -> None:
    assert {f.name: f.value for f in ours.Finish} == {
        f.name: f.value for f in FinishReason if f.name in ours.Finish.__members__
    }
    assert [e.value for e in EngineCoreEventType] == [1, 2, 3]


def test_a_request_of_vllm_is_read() -> None:
    params = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=[5],
        logprobs=3,
        prompt_logprobs=1,
        extra_args={"kv_transfer_params": {}},
    )
    params.update_from_generation_config({"eos_token_id": 2}, 2)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 70_000],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=1.0,
        lora_request=LoRARequest("poet", 7, "/adapters/poet"),
        cache_salt="salt",
        data_parallel_rank=None,
        trace_headers={"a": "b"},
        external_req_id="x",
    )
    read = ours.read_request([bytes(frame) for frame in MsgpackEncoder().encode(request)])
    assert (read.request_id, read.prompt_token_ids, read.cache_salt) == ("r", [1, 2, 70_000], "salt")
    assert ours.adapter_of(read) == 7
    sampling = read.sampling_params
    assert sampling is not None
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, [5])
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.eos_token_id) == (3, 1, 2)
    assert sampling.extra_args == {"kv_transfer_params": {}}


def test_vllm_reads_our_outputs() -> None:
    scores = np.arange(6).reshape(2, 3)
    output = ours.Output(
        "r",
        [7],
        new_logprobs=ours.logprobs_rows(scores[:1], as_tensors=False),
        new_prompt_logprobs_tensors=ours.logprobs_rows(scores, as_tensors=True),
        finish_reason=ours.Finish.STOP,
        stop_reason=7,
        events=[ours.EngineEvent(1, 0.5), ours.EngineEvent(2, 1.5)],
        prefill_stats=ours.PrefillStats(10, 4, 6, 5, 1),
    )
    stats = ours.SchedulerStats(3, 4, 0.5, ours.PrefixCacheStats(1, 10, 6))
    frames = ours.outputs_frames(ours.Outputs(outputs=[output], scheduler_stats=stats, timestamp=9.0))
    read: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    (theirs,) = read.outputs
    assert (theirs.request_id, theirs.new_token_ids, theirs.finish_reason, theirs.stop_reason) == (
        "r",
        [7],
        FinishReason.STOP,
        7,
    )
    assert theirs.new_logprobs is not None
    assert theirs.new_logprobs.logprob_token_ids.tolist() == [[0, 1, 2]]
    assert theirs.new_logprobs.logprobs.dtype == np.float32
    tensors = theirs.new_prompt_logprobs_tensors
    assert tensors is not None
    assert torch.equal(tensors.logprob_token_ids, torch.tensor(scores))
    assert tensors.selected_token_ranks.tolist() == [1, 1]
    assert [(e.type, e.timestamp) for e in theirs.events or ()] == [
        (EngineCoreEventType.QUEUED, 0.5),
        (EngineCoreEventType.SCHEDULED, 1.5),
    ]
    assert theirs.prefill_stats == vllm_stats.PrefillStats(10, 4, 6, 5, 1)
    assert read.scheduler_stats is not None
    assert (read.scheduler_stats.num_running_reqs, read.scheduler_stats.num_waiting_reqs) == (3, 4)
    assert read.scheduler_stats.prefix_cache_stats.hits == 6
    assert read.timestamp == 9.0


def test_vllm_reads_an_output_with_nothing_but_a_token() -> None:
    read: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(
        ours.outputs_frames(ours.Outputs(outputs=[ours.Output("r", [7])], timestamp=1.0))
    )
    assert read.outputs == [EngineCoreOutput("r", [7])]


@pytest.mark.parametrize("frames", [[], [b"\xc1"], [b"\x90"], [b"\x80"]])
def test_frames_that_are_no_request_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ours.RequestUnreadable):
        ours.read_request(frames)
