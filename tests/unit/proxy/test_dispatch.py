"""Requests through fake workers on a real socket: answers, failures, cancellation, and that nothing is left behind."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind

from cluster import messages
from tests.unit.proxy.fake_worker import EOS, FakeWorker, generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, failure, mini_cluster, read, until


def transfer_of(request: Any) -> Any:
    return request.sampling_params.extra_args["kv_transfer_params"]


# --------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("reserve_at_start", [True, False])
@pytest.mark.parametrize("overtakes", [True, False])
async def test_an_answer_through_two_workers_is_that_of_one(
    tmp_path: Path, reserve_at_start: bool, overtakes: bool
) -> None:
    async with mini_cluster(tmp_path, reserve_at_start=reserve_at_start) as cluster:
        cluster["prefill-0"].output_delay_s = 0.05 if overtakes else 0.0
        answer = await cluster.run(logprobs=0)
        assert answer.tokens[0] == generate(PROMPT, 5)
        assert answer.num_logprobs[0] == 5
        assert answer.finish_reasons == {0: "length"}
        assert answer.cached_tokens == 7, "what the prefill worker had cached"
        prefill, decode = cluster["prefill-0"].submitted[0], cluster["decode-0"].submitted[0]
        assert prefill.sampling_params.max_tokens == 1
        assert decode.prompt_token_ids == [*PROMPT, 0]
        assert decode.sampling_params.max_tokens == 4
        assert transfer_of(prefill)["transfer_id"] == transfer_of(decode)["transfer_id"]
        exporter = transfer_of(decode)["exporter"]
        assert exporter["worker_id"] == "prefill-0"
        assert exporter["ranks"] == [{"rank": 0, "address": "ipc://prefill-0", "epoch": cluster["prefill-0"].epoch}]
        cluster.assert_idle()
        assert cluster.metric("remote_prefill_tokens_total") == len(PROMPT)
        assert cluster.metric("handover_bytes_total", link="host") == 1024


@pytest.mark.parametrize(
    ("changes", "num_gaps"),
    [({}, 1), ({"max_tokens": 1}, 0), ({"presence_penalty": 0.5}, 0)],
    ids=["handed over", "one token", "both tokens are the decode worker's"],
)
async def test_the_hand_off_gap_is_that_between_tokens_of_two_workers(
    tmp_path: Path, changes: dict[str, Any], num_gaps: int
) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await cluster.run(**changes)
        assert cluster.metric("handover_gap_seconds_count") == num_gaps


async def test_a_prefill_worker_that_never_says_it_started_still_hands_over(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].say_started = False
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
        cluster.assert_idle()


async def test_exact_mode_gives_the_same_answer_and_takes_the_prompts_scores_from_the_prefill(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        answer = await cluster.run(presence_penalty=0.5, prompt_logprobs=0, logprobs=0)
        assert answer.tokens[0] == generate(PROMPT, 5)
        assert answer.num_logprobs[0] == 5
        assert answer.cached_tokens == 7
        scores = answer.outputs[0].prompt_logprobs
        assert scores is not None
        assert len(scores) == len(PROMPT)
        prefill, decode = cluster["prefill-0"].submitted[0], cluster["decode-0"].submitted[0]
        assert decode.prompt_token_ids == PROMPT
        assert decode.sampling_params.max_tokens == 5
        assert decode.sampling_params.prompt_logprobs is None
        assert decode.sampling_params.skip_reading_prefix_cache is False
        assert prefill.sampling_params.skip_reading_prefix_cache is True
        assert prefill.sampling_params.presence_penalty == 0.0
        assert transfer_of(prefill)["decode_wants_first_token"] is False
        cluster.assert_idle()


async def test_one_token_comes_from_the_prefill_worker_alone(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        answer = await cluster.run(max_tokens=1, prompt_logprobs=0, presence_penalty=0.1)
        assert answer.tokens[0] == generate(PROMPT, 1)
        assert answer.finish_reasons == {0: "length"}
        assert cluster["prefill-0"].submitted[0].sampling_params.extra_args.keys() == {"twinpool"}
        assert cluster["decode-0"].submitted == []
        cluster.assert_idle()


@pytest.mark.parametrize(("token", "stop_reason"), [(EOS, None), (333, 333)])
async def test_a_first_token_that_stops_never_starts_decoding(tmp_path: Path, token: int, stop_reason: Any) -> None:
    async with mini_cluster(tmp_path, reserve_at_start=False) as cluster:
        cluster["prefill-0"].force_first_token = token
        answer = await cluster.run(stop_token_ids=[333])
        assert answer.tokens[0] == [token]
        assert answer.finish_reasons == {0: "stop"}
        assert answer.stop_reasons == {0: stop_reason}
        await until(lambda: cluster["prefill-0"].dropped)
        assert cluster["decode-0"].submitted == []
        cluster.assert_idle()


async def test_a_first_token_that_stops_takes_back_the_decode_leg(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].force_first_token = EOS
        await cluster.run()
        await until(lambda: cluster["decode-0"].aborted)
        await until(lambda: not cluster["decode-0"].running)
        await until(lambda: cluster["prefill-0"].dropped)
        cluster.assert_idle()


@pytest.mark.parametrize("reserve_at_start", [True, False])
async def test_requests_that_wait_for_their_prefill_are_spread_over_the_decode_workers(
    tmp_path: Path, reserve_at_start: bool
) -> None:
    async with mini_cluster(
        tmp_path, "prefill-0", "decode-0", "decode-1", reserve_at_start=reserve_at_start
    ) as cluster:
        cluster["prefill-0"].say_started = False
        cluster["prefill-0"].gate.clear()
        collectors = [await cluster.add(cluster.request()) for _ in range(4)]
        await until(lambda: len(cluster["prefill-0"].submitted) == 4)
        cluster["prefill-0"].gate.set()
        for collector in collectors:
            await read(collector)
        assert [len(cluster[name].submitted) for name in ("decode-0", "decode-1")] == [2, 2]
        cluster.assert_idle()


async def test_a_short_prompt_is_served_by_the_decode_worker(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        answer = await cluster.run(prompt=[9, 8, 7])
        assert answer.tokens[0] == generate([9, 8, 7], 5)
        assert answer.cached_tokens == 5, "what the decode worker had cached"
        assert cluster["prefill-0"].submitted == []
        assert cluster.metric("decisions_total", placement="local", reason="short_prompt") == 1


@pytest.mark.parametrize("values", [{}, {"presence_penalty": 0.5}, {"prompt_logprobs": 0}])
async def test_of_three_siblings_one_is_handed_over_and_the_others_follow(tmp_path: Path, values: Any) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "decode-0", "decode-1") as cluster:
        answer = await cluster.run(n=3, temperature=0.8, output_kind=RequestOutputKind.FINAL_ONLY, **values)
        assert answer.tokens == {index: generate(PROMPT, 5) for index in range(3)}
        assert answer.finish_reasons == dict.fromkeys(range(3), "length")
        assert len(cluster["prefill-0"].submitted) == 1
        used = [w for w in ("decode-0", "decode-1") if cluster[w].submitted]
        assert len(used) == 1, "siblings decode where the prompt is"
        followers = cluster[used[0]].submitted[1:]
        assert len(followers) == 2
        assert all(f.sampling_params.extra_args.keys() == {"twinpool"} for f in followers)
        assert all(f.sampling_params.prompt_logprobs is None for f in followers), "computed once, by the prefill"
        if "prompt_logprobs" in values:
            scores = answer.outputs[-1].prompt_logprobs
            assert scores is not None
            assert len(scores) == len(PROMPT)
        await until(lambda: cluster.client.dispatcher.trips == {})
        cluster.assert_idle()


@pytest.mark.parametrize("values", [{}, {"max_tokens": 1}, {"presence_penalty": 0.5}])
async def test_siblings_follow_as_there_is_room(tmp_path: Path, values: Any) -> None:
    async with mini_cluster(tmp_path, "prefill-0") as cluster:
        await cluster.join("decode-0", max_num_seqs=4)
        worker = cluster["prefill-0" if "max_tokens" in values else "decode-0"]
        worker.step_s = 0.002
        most = 0
        answers = asyncio.create_task(cluster.run(n=40, temperature=0.8, **values))
        while not answers.done():
            most = max(most, len(worker.running))
            await asyncio.sleep(0.001)
        answer = await answers
        assert answer.tokens == {index: generate(PROMPT, values.get("max_tokens", 5)) for index in range(40)}
        assert 2 <= most <= (8 if "max_tokens" in values else 4)
        assert len(worker.submitted) == 40
        await until(lambda: cluster.client.dispatcher.trips == {})
        cluster.assert_idle()


async def test_siblings_that_wait_for_room_survive_the_worker_that_their_prompt_is_on(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0") as cluster:
        await cluster.join("decode-0", max_num_seqs=4)
        await cluster.join("decode-1", max_num_seqs=4)
        for name in ("decode-0", "decode-1"):
            cluster[name].close_gate_after = 2
        collector = await cluster.add(cluster.request(n=20, temperature=0.8))
        await until(lambda: sum(len(cluster[name].submitted) for name in ("decode-0", "decode-1")) >= 4)
        loaded = max(("decode-0", "decode-1"), key=lambda name: len(cluster[name].submitted))
        assert len(cluster[loaded].submitted) == 4
        for name in ("decode-0", "decode-1"):
            cluster[name].open_gate()
        cluster.kill(loaded)
        answer = await read(collector)
        assert answer.tokens == {index: generate(PROMPT, 5) for index in range(20)}
        await until(lambda: cluster.client.dispatcher.trips == {})
        cluster.assert_idle()


async def test_siblings_follow_a_leader_that_ends_at_once_when_its_scores_come(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster["prefill-0"].output_delay_s = 0.3  # the decode worker has long finished, and its outputs wait
        answer = await cluster.run(n=3, temperature=0.8, output_kind=RequestOutputKind.FINAL_ONLY, prompt_logprobs=0)
        assert answer.tokens == {index: generate(PROMPT, 5) for index in range(3)}
        assert len(cluster["prefill-0"].submitted) == 1
        assert sorted(len(cluster[w].submitted) for w in ("decode-0", "decode-1")) == [0, 3]
        await until(lambda: cluster.client.dispatcher.trips == {})
        cluster.assert_idle()


async def test_siblings_of_one_token_all_come_from_one_prefill_worker(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "prefill-1", "decode-0") as cluster:
        answer = await cluster.run(n=3, max_tokens=1, temperature=0.8)
        assert len(answer.finish_reasons) == 3
        assert sorted(len(cluster[w].submitted) for w in ("prefill-0", "prefill-1")) == [0, 3]
        cluster.assert_idle()


async def test_when_the_leading_sibling_stops_at_once_the_next_one_leads(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, reserve_at_start=False) as cluster:
        cluster["prefill-0"].force_first_token = EOS
        answer = await cluster.run(n=3, temperature=0.8)
        assert answer.tokens == {index: [EOS] for index in range(3)}
        assert len(cluster["prefill-0"].submitted) == 3
        await until(lambda: len(cluster["prefill-0"].dropped) == 3)
        cluster.assert_idle()


async def test_many_requests_with_one_client_id_do_not_mix(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        prompts = [[50 + n, *PROMPT] for n in range(40)]
        answers = await asyncio.gather(*(cluster.run(prompt=prompt) for prompt in prompts))
        assert [a.tokens[0] for a in answers] == [generate(prompt, 5) for prompt in prompts]
        cluster.assert_idle()


async def test_one_engine_step_is_one_batch_with_its_workers_number(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await cluster.run()
        assert {batch.engine_index for batch in cluster.batches if batch.outputs} == {0, 1}
        assert all(batch.scheduler_stats is not None for batch in cluster.batches)
        assert all(output.kv_transfer_params is None for batch in cluster.batches for output in batch.outputs)


# ---------------------------------------------------------------------------------------------------- cancellation


async def abort_when(cluster: MiniCluster, situation: str) -> None:
    """Brings a request into a situation and lets the client leave."""
    prefill, decode = cluster["prefill-0"], cluster["decode-0"]
    if situation == "queued at the prefill worker":
        prefill.gate.clear()
    elif situation == "computing at the prefill worker":
        prefill.step_s = 30.0
    elif situation in ("queued at the decode worker", "handed over"):
        decode.gate.clear()
    elif situation == "decoding":
        decode.step_s = 30.0
    request = cluster.request()
    await cluster.add(request)
    await until(lambda: prefill.submitted)
    if situation in ("computing at the prefill worker", "decoding"):
        await until(lambda: decode.submitted)
    if situation in ("queued at the decode worker", "handed over", "decoding"):
        await until(lambda: decode.first_tokens)
    await cluster.abort(request.request_id)


@pytest.mark.parametrize(
    "situation",
    [
        "queued at the prefill worker",
        "computing at the prefill worker",
        "handed over",
        "queued at the decode worker",
        "decoding",
    ],
)
async def test_a_client_that_leaves_frees_both_workers(tmp_path: Path, situation: str) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await abort_when(cluster, situation)
        cluster.assert_idle()
        await until(lambda: not cluster["prefill-0"].running and not cluster["decode-0"].running, timeout_s=0.1)
        if situation != "decoding":
            await until(lambda: cluster["prefill-0"].dropped, timeout_s=0.1)


async def test_a_client_that_leaves_takes_all_siblings_along(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].gate.clear()
        request = cluster.request(n=3, temperature=0.8)
        parent_id = request.request_id
        await cluster.add(request)
        await cluster.abort(parent_id)
        cluster.assert_idle()
        await until(lambda: not cluster["prefill-0"].running)


async def test_an_abort_of_everything_at_once_leaves_nothing(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 0.01
        requests = [cluster.request(max_tokens=500) for _ in range(30)]
        for request in requests:
            await cluster.add(request)
        await asyncio.sleep(0.05)
        for request in requests:
            await cluster.abort(request.request_id)
        cluster.assert_idle()
        await until(lambda: not cluster["prefill-0"].running and not cluster["decode-0"].running)
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)


# ---------------------------------------------------------------------------------------------------------- policy


async def test_without_prefill_workers_requests_are_local_and_counted(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "decode-0") as cluster:
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("decisions_total", placement="local", reason="no_prefill_worker") == 1


async def test_a_queued_request_is_placed_when_a_worker_comes(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "decode-0", on_no_prefill="queue") as cluster:
        collector = await cluster.add(cluster.request())
        assert cluster.client.dispatcher.num_waiting == 1
        await cluster.join("prefill-0")
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)


async def test_a_queued_request_that_nobody_takes_is_answered_504(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "decode-0", on_no_prefill="queue") as cluster:
        error = await failure(cluster, await cluster.add(cluster.request()))
        assert error.http_status == 504
        assert cluster.metric("requests_rejected_total", slo_class="default", reason="queue_timeout") == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_a_rejected_request_is_answered_503_at_once(tmp_path: Path, n: int) -> None:
    async with mini_cluster(tmp_path, "decode-0", on_no_prefill="reject") as cluster:
        error = await failure(cluster, await cluster.add(cluster.request(n=n, temperature=0.8)))
        assert error.http_status == 503
        assert "on_no_prefill" in error.message
        assert cluster["decode-0"].submitted == []


async def test_open_leases_are_held_until_the_handover_has_ended(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].gate.clear()
        collector = await cluster.add(cluster.request())
        await until(lambda: len(cluster["prefill-0"].held) >= 2)
        cluster["decode-0"].gate.set()
        await read(collector)
        held = len(cluster["prefill-0"].held)
        await asyncio.sleep(0.3)
        assert len(cluster["prefill-0"].held) <= held + 1


async def test_shutting_down_ends_every_request_with_an_error(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 30.0
        collectors = [await cluster.add(cluster.request(n=n, temperature=0.8)) for n in (1, 2)]
        cluster.client.dispatcher.fail_all(503, "The server is shutting down")
        for collector in collectors:
            assert (await failure(cluster, collector)).message == "The server is shutting down"
        await until(lambda: not cluster["decode-0"].running and not cluster["prefill-0"].running)


async def test_a_closed_cluster_finishes_what_it_has_and_takes_nothing_new(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].gate.clear()
        collector = await cluster.add(cluster.request())
        cluster.client.dispatcher.close()
        with pytest.raises(GracefulHTTPError) as caught:
            await read(await cluster.add(cluster.request()))
        assert (caught.value.http_status, "being stopped" in caught.value.message) == (503, True)
        cluster["prefill-0"].gate.set()
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        cluster.assert_idle()
        assert cluster.metric("requests_rejected_total", slo_class="default", reason="closed") == 1


# ------------------------------------------------------------------------------------------------ hostile messages


async def test_malformed_frames_are_dropped_and_counted(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(cluster.address)
        encode = msgspec.msgpack.encode
        worker = cluster["prefill-0"]
        hostile: list[list[bytes]] = [
            [b""],
            [b"\xc1\xc1"],
            [encode({"type": "unknown"})],
            [encode(messages.PrefillStarted("x")), b"extra"],
            [encode(worker.load())[:-3]],
            [encode(messages.PrefillStarted("x"))],
            [encode(messages.Outputs(worker.epoch)), b"\x90"],
        ]
        for frames in hostile:
            await stranger.send_multipart(frames)
        await worker.say(messages.Outputs(worker.epoch), [b"\xff\xff"])
        await worker.say(messages.Outputs(worker.epoch))
        await worker.say(messages.Outputs("another-life"), [b"\x90"])
        await until(lambda: cluster.metric("bad_frames_total") == len(hostile) + 3)
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
        stranger.close()
        context.term()


async def test_news_of_unknown_requests_change_nothing(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["decode-0"]
        await worker.say(messages.PrefillStarted("nobody"))
        await worker.say(messages.HandoverClosed("nobody", "loaded", "", "host", 1, 1, 0.0, 0.0, 0.0))
        await worker.say(messages.UtilityReply(99, "", msgspec.Raw(b"\xc0")))
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("illegal_transitions_total") == 0


async def test_a_worker_of_another_model_is_refused(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        other = await FakeWorker("decode-1", cluster.address, cluster.exchange, model="other").start()
        await until(lambda: other.rejected)
        assert "serves the model other" in other.rejected
        await other.stop()


async def test_decode_workers_meet_prefill_workers_as_either_joins(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await until(lambda: cluster["decode-0"].met == ["ipc://prefill-0"])
        await cluster.join("prefill-1", "decode-1")
        await until(lambda: cluster["decode-0"].met == ["ipc://prefill-0", "ipc://prefill-1"])
        await until(lambda: sorted(cluster["decode-1"].met) == ["ipc://prefill-0", "ipc://prefill-1"])
        assert cluster["prefill-0"].met == []
