"""Outputs of the legs, merged into those of one request."""

from typing import Any

import pytest
import torch
import zmq
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackEncoder

from proxy.legs.vllm_leg_outputs import (
    BadOutputs,
    OutputDecoder,
    add_prompt_scores,
    batch,
    client_output,
    is_plain,
    leg_event,
    passed_on,
    prompt_scores,
)

QUEUED = EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)
SCHEDULED = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.0)
PREEMPTED = EngineCoreEvent(EngineCoreEventType.PREEMPTED, 3.0)


def output(**values: Any) -> EngineCoreOutput:
    return EngineCoreOutput(**{"request_id": "leg", "new_token_ids": [5], **values})


def test_the_prefill_legs_length_is_not_the_clients() -> None:
    stats = PrefillStats(num_prompt_tokens=9)
    leg = output(finish_reason=FinishReason.LENGTH, prefill_stats=stats, events=[QUEUED], kv_transfer_params={"x": 1})
    merged = client_output(leg, "client", "prefill", False, None)
    assert merged.request_id == "client"
    assert merged.finish_reason is None
    assert merged.prefill_stats is stats
    assert merged.events == [QUEUED]
    assert merged.kv_transfer_params is None


def test_a_prefill_token_that_ends_the_request_keeps_its_reason() -> None:
    merged = client_output(output(finish_reason=FinishReason.STOP, stop_reason=7), "client", "prefill", True, None)
    assert (merged.finish_reason, merged.stop_reason) == (FinishReason.STOP, 7)


def test_of_the_decode_leg_the_client_sees_tokens_and_preemptions_only() -> None:
    leg = output(prefill_stats=PrefillStats(), events=[QUEUED, SCHEDULED, PREEMPTED])
    merged = client_output(leg, "client", "decode", False, None)
    assert merged.prefill_stats is None
    assert merged.events == [PREEMPTED]
    assert client_output(output(events=[QUEUED]), "client", "decode", False, None).events is None


@pytest.mark.parametrize("leg", ["decode", "local"])
def test_a_plain_output_is_passed_on_as_it_would_be_merged(leg: Any) -> None:
    values: dict[str, Any] = {"kv_transfer_params": {"x": 1}, "num_nans_in_logits": 3, "stop_reason": 7}
    assert is_plain(output(**values))
    assert passed_on(output(**values), "client") == client_output(output(**values), "client", leg, False, None)


@pytest.mark.parametrize(
    "news", [{"finish_reason": FinishReason.STOP}, {"events": [PREEMPTED]}, {"prefill_stats": PrefillStats()}]
)
def test_an_output_with_news_is_not_plain(news: dict[str, Any]) -> None:
    assert not is_plain(output(**news))


def test_in_exact_mode_the_first_decode_output_carries_what_the_prefill_knew() -> None:
    scores = LogprobsTensors(torch.ones(2, 1), torch.ones(2, 1), torch.ones(2))
    stats = PrefillStats(num_prompt_tokens=3)
    prefill = output(new_prompt_logprobs_tensors=scores, prefill_stats=stats, events=[QUEUED, SCHEDULED])
    merged = client_output(output(new_token_ids=[8], events=[SCHEDULED, PREEMPTED]), "client", "decode", False, prefill)
    assert merged.new_token_ids == [8]
    assert merged.new_prompt_logprobs_tensors is scores
    assert merged.prefill_stats is stats
    assert merged.events == [QUEUED, SCHEDULED, PREEMPTED]


def test_a_local_leg_is_passed_on_whole() -> None:
    leg = output(prefill_stats=PrefillStats(), events=[QUEUED], finish_reason=FinishReason.LENGTH)
    merged = client_output(leg, "client", "local", True, None)
    assert merged.prefill_stats is not None
    assert merged.events == [QUEUED]
    assert merged.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("leg", ["prefill", "decode", "local"])
def test_of_a_leg_that_continues_an_answer_the_client_sees_tokens_and_preemptions_only(leg: Any) -> None:
    merged = client_output(
        output(prefill_stats=PrefillStats(), events=[QUEUED, SCHEDULED, PREEMPTED]), "client", leg, False, None, True
    )
    assert merged.prefill_stats is None
    assert merged.events == [PREEMPTED]


def test_siblings_share_the_prompts_scores() -> None:
    scores = LogprobsTensors(torch.ones(2, 1), torch.ones(2, 1), torch.ones(2))
    leader = output(new_prompt_logprobs_tensors=scores, prefill_stats=PrefillStats(num_prompt_tokens=3))
    follower = output()
    add_prompt_scores(follower, prompt_scores(leader))
    assert follower.new_prompt_logprobs_tensors is scores
    assert follower.prefill_stats is leader.prefill_stats


@pytest.mark.parametrize("reason", list(FinishReason))
def test_flights_know_every_finish_reason_by_vllms_name(reason: FinishReason) -> None:
    assert leg_event("local", output(finish_reason=reason)).finish in ("stop", "length", "abort", "error", "repetition")


def test_an_output_without_tokens_has_no_first_token() -> None:
    assert leg_event("prefill", output(new_token_ids=[])).token is None
    assert leg_event("prefill", output(new_token_ids=[5, 6])).token == 5


def test_a_step_keeps_its_clock_and_statistics() -> None:
    step = EngineCoreOutputs(timestamp=5.0, scheduler_stats=SchedulerStats(kv_connector_stats={"x": 1}))
    merged = batch(1, [output()], step)
    assert (merged.engine_index, merged.timestamp) == (1, 5.0)
    assert merged.scheduler_stats is not None
    assert merged.scheduler_stats.kv_connector_stats is None, "the front end could not read them"


def frames(*parts: bytes) -> list[zmq.Frame]:
    return [zmq.Frame(part) for part in parts]


def test_frames_are_decoded_as_vllm_encodes_them() -> None:
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output()]))
    decoded = OutputDecoder().decode(frames(*(bytes(part) for part in encoded)))
    assert decoded.outputs[0].new_token_ids == [5]


@pytest.mark.parametrize("parts", [(), (b"",), (b"\xc1",), (b"\x93\x01\x02\x03",), (b"\x80" * 50,)])
def test_whatever_else_comes_is_refused(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(BadOutputs):
        OutputDecoder().decode(frames(*parts))


def test_pickle_is_refused() -> None:
    # MessagePack extension 1 is vLLM's pickle, where it is allowed.
    pickled = b"\x92\x00\x91\x9f\xa1a\x90\xc0\xc0\xc7\x05\x01hello" + b"\xc0" * 11
    with pytest.raises(BadOutputs):
        OutputDecoder().decode(frames(pickled))
