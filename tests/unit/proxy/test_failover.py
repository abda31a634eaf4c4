"""Workers die under requests, on real sockets: the client sees the undisturbed answer, or an error saying why not."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from proxy.flights.flight import Stage
from tests.unit.proxy.fake_worker import EOS, generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, failure, mini_cluster, read, until

TWO_OF_EACH = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NUM_TOKENS = 60

# ------------------------------------------------------------------------------------- wherever the request has got to


POINTS = ("prefill queue", "prefill", "prefill done, not reported", "decode queue", "first decode step", "step 50")
LOST = ("prefill", "decode", "prefill and decode")


def stop_at(cluster: MiniCluster, point: str) -> None:
    """Lets requests come as far as `point`, on whichever workers."""
    for worker in cluster.workers.values():
        match worker.role, point:
            case ("prefill", "prefill queue") | ("decode", "decode queue"):
                worker.gate.clear()
            case ("prefill", "prefill"):
                worker.close_gate_at = "started"
            case ("prefill", "prefill done, not reported"):
                worker.close_gate_at = "computed"
            case ("decode", "first decode step"):
                worker.close_gate_at = "loaded"
            case ("decode", "step 50"):
                worker.close_gate_after = worker.num_tokens + 50


async def come_to(cluster: MiniCluster, point: str, sent: int) -> None:
    """Waits until a request of which `sent` tokens were given before has come there."""
    match point:
        case "prefill queue":
            await until(lambda: cluster.flight.stage is Stage.PREFILLING)
        case "prefill" | "prefill done, not reported":
            await until(lambda: cluster.flight.decode_submitted)
        case "decode queue":
            await until(lambda: len(cluster.sent) == sent + 1)
        case "first decode step":
            await until(lambda: cluster.flight.stage is Stage.DECODING)
        case "step 50":
            await until(lambda: len(cluster.sent) == sent + 51)


def kill(cluster: MiniCluster, roles: str) -> None:
    """Kills the workers that serve the only request; the others work on."""
    flight = cluster.flight
    cluster.kill(*(getattr(flight, role) for role in roles.split(" and ")))
    for worker in cluster.workers.values():
        worker.open_gate()


@pytest.mark.parametrize("roles", LOST)
@pytest.mark.parametrize("point", POINTS)
async def test_the_answer_is_the_undisturbed_one_wherever_workers_die(tmp_path: Path, point: str, roles: str) -> None:
    async with mini_cluster(tmp_path, *TWO_OF_EACH) as cluster:
        stop_at(cluster, point)
        collector = await cluster.add(cluster.request(max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0))
        await come_to(cluster, point, 0)
        kill(cluster, roles)
        answer = await read(collector)
        assert answer.tokens[0] == generate(PROMPT, NUM_TOKENS)
        assert answer.finish_reasons == {0: "length"}
        assert answer.num_logprobs[0] == NUM_TOKENS
        assert answer.cached_tokens == 7, "what the prefill worker of the first token had cached"
        scores = [len(output.prompt_logprobs) for output in answer.outputs if output.prompt_logprobs]
        assert scores == [len(PROMPT)]
        assert cluster.metric("illegal_transitions_total") == 0
        cluster.assert_idle()


@pytest.mark.parametrize("roles", LOST)
@pytest.mark.parametrize("point", POINTS)
async def test_the_workers_that_go_on_with_an_answer_may_die_too(tmp_path: Path, point: str, roles: str) -> None:
    async with mini_cluster(tmp_path, *TWO_OF_EACH, "prefill-2", "decode-2") as cluster:
        stop_at(cluster, "first decode step")
        collector = await cluster.add(cluster.request(max_tokens=NUM_TOKENS))
        await come_to(cluster, "first decode step", 0)
        kill(cluster, "prefill and decode")
        stop_at(cluster, point)
        await come_to(cluster, point, 1)
        kill(cluster, roles)
        assert (await read(collector)).tokens[0] == generate(PROMPT, NUM_TOKENS)
        assert cluster.metric("illegal_transitions_total") == 0
        cluster.assert_idle()


async def test_thirty_streams_survive_workers_that_die_at_random(tmp_path: Path) -> None:
    dice = random.Random(5)
    workers = [*TWO_OF_EACH, "decode-2", "decode-3"]
    async with mini_cluster(tmp_path, *workers, max_losses=100) as cluster:
        for worker_id in workers:
            cluster[worker_id].step_s = 0.002
        prompts = [[50 + n, *PROMPT] for n in range(30)]
        collectors = [await cluster.add(cluster.request(prompt, max_tokens=40)) for prompt in prompts]
        answers = asyncio.gather(*(read(collector, timeout_s=20) for collector in collectors))
        open_ = cluster.client.dispatcher.trips
        trips = list(open_.values())

        def num_sent() -> int:
            return sum(len(trip.sent or []) for trip in trips)

        for number in range(7):
            goal = num_sent() + 60
            # On a busy machine they may all end before the last deaths.
            await until(lambda goal=goal: num_sent() >= goal or not open_, timeout_s=10)  # type: ignore[misc]
            await cluster.restart(dice.choice(workers[2:] if number % 2 else workers))
        assert [a.tokens[0] for a in await answers] == [generate(prompt, 40) for prompt in prompts]
        assert cluster.metric("migrations_total", cause="exited") > 0
        assert cluster.metric("illegal_transitions_total") == 0
        cluster.assert_idle()


# --------------------------------------------------------------------------------------------------- continuations


async def cut_off(cluster: MiniCluster, decoded: int, request: EngineCoreRequest | None = None, **values: Any) -> Any:
    """A request whose decode worker dies after so many tokens, when there is a second one; its collector."""
    worker = cluster["decode-0"]
    worker.close_gate_after = decoded
    collector = await cluster.add(request or cluster.request(**values))
    (trip,) = cluster.client.dispatcher.trips.values()
    await until(lambda: worker.num_tokens == decoded)
    given = decoded + (trip.flight.first_token_mode and trip.flight.stage is not Stage.LOCAL)
    await until(lambda: trip.num_outputs == given)
    await cluster.join("decode-1")
    cluster.kill("decode-0")
    return collector


async def test_what_is_left_is_handed_over_again_with_everything_else_as_it_was(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        request = cluster.request(max_tokens=10, min_tokens=6, prompt_logprobs=0, stop_token_ids=[EOS])
        request.lora_request = LoRARequest("adapter", 1, "/adapters/1")
        await cluster.client.add_lora_async(request.lora_request)
        request.cache_salt, request.priority, request.data_parallel_rank = "salt", 3, 0
        request.trace_headers, request.arrival_time = {"traceparent": "00-1"}, 5.0
        answer = await read(await cut_off(cluster, 3, request))
        prompt = [*PROMPT, *generate(PROMPT, 3)]
        prefill, decode = cluster["prefill-0"].submitted[1], cluster["decode-1"].submitted[0]
        assert decode.prompt_token_ids == prompt
        assert (decode.sampling_params.max_tokens, decode.sampling_params.min_tokens) == (7, 3)
        for leg in (prefill, decode):
            assert leg.sampling_params.prompt_logprobs is None
            assert leg.lora_request == request.lora_request
            assert (leg.cache_salt, leg.priority, leg.data_parallel_rank) == ("salt", 3, 0)
            assert (leg.trace_headers, leg.arrival_time) == ({"traceparent": "00-1"}, 5.0)
        assert answer.tokens[0] == generate(PROMPT, 10)
        assert answer.outputs[-1].prompt_token_ids == PROMPT


async def test_when_one_token_is_left_the_prefill_worker_gives_it(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        answer = await read(await cut_off(cluster, 3, max_tokens=5))
        assert answer.tokens[0] == generate(PROMPT, 5)
        assert answer.finish_reasons == {0: "length"}
        assert cluster["decode-1"].submitted == []


async def test_a_short_request_goes_on_at_another_decode_worker(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, prefill_from=1000) as cluster:
        answer = await read(await cut_off(cluster, 2))
        assert answer.tokens[0] == generate(PROMPT, 5)
        assert answer.cached_tokens == 5, "what the first decode worker had cached"


async def test_a_continued_answer_stops_at_a_stop_token(tmp_path: Path) -> None:
    whole = generate(PROMPT, 20)
    expected = whole[: next(i for i in range(6, 20) if whole[i] not in whole[:i]) + 1]
    async with mini_cluster(tmp_path) as cluster:
        answer = await read(await cut_off(cluster, 3, max_tokens=20, stop_token_ids=[expected[-1]]))
        assert answer.tokens[0] == expected
        assert answer.finish_reasons == {0: "stop"}
        assert answer.stop_reasons == {0: expected[-1]}


async def test_an_engine_that_ends_a_request_by_itself_is_not_asked_again_if_there_is_another(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["decode-0"]
        worker.close_gate_after = 2
        collector = await cluster.add(cluster.request())
        await until(lambda: len(cluster.sent) == 3)
        await cluster.join("decode-1")
        (leg,) = worker.running
        await worker.outputs(EngineCoreOutput(leg, [], finish_reason=FinishReason.ABORT))
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        assert len(cluster["decode-1"].submitted) == 1
        assert cluster.metric("migrations_total", cause="ended_by_worker") == 1
        assert cluster.metric("replacements_total") == 0


@pytest.mark.parametrize("comes_back", [True, False])
async def test_an_answer_without_a_decode_worker_waits_in_the_queue_if_the_policy_says_so(
    tmp_path: Path, comes_back: bool
) -> None:
    async with mini_cluster(tmp_path, on_no_prefill="queue") as cluster:
        cluster["decode-0"].close_gate_after = 2
        collector = await cluster.add(cluster.request())
        await until(lambda: len(cluster.sent) == 3)
        cluster.kill("decode-0")
        if comes_back:
            await cluster.join("decode-1")
            assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        else:
            error = await failure(cluster, collector)
            assert error.http_status == 504
            assert "decode-0 was killed by SIGKILL" in error.message


# -------------------------------------------------------------------------------------------------- what cannot go on


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("seed", {"seed": 3, "temperature": 0.7}),
        ("structured_outputs", {"structured_outputs": StructuredOutputsParams(regex="a+")}),
    ],
)
async def test_what_cannot_be_continued_exactly_is_an_error_that_names_worker_and_parameter(
    tmp_path: Path, field: str, values: dict[str, Any]
) -> None:
    async with mini_cluster(tmp_path) as cluster:
        error = await failure(cluster, await cut_off(cluster, 3, **values))
        assert error.http_status == 503
        assert error.message.startswith("Worker decode-0 was killed by SIGKILL")
        assert f"`{field}` depends on the tokens generated so far" in error.message
        assert cluster.metric("requests_failed_total", status="503", cause="not_continuable") == 1


async def test_what_cannot_be_continued_starts_over_as_long_as_nobody_has_seen_it(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].gate.clear()
        collector = await cluster.add(cluster.request(presence_penalty=0.5))
        await until(lambda: cluster["decode-0"].submitted)
        await cluster.join("decode-1")
        cluster.kill("decode-0")
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("replacements_total") == 1


async def test_streamed_input_is_not_continued(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].gate.clear()
        request = cluster.request()
        request.resumable = True
        collector = await cluster.add(request)
        await until(lambda: cluster["decode-0"].submitted)
        await cluster.join("decode-1")
        cluster.kill("decode-0")
        assert "cannot move between workers (streamed input)" in (await failure(cluster, collector)).message


async def test_a_request_that_kills_its_workers_does_not_kill_them_all(tmp_path: Path) -> None:
    workers = {f"decode-{n}" for n in range(4)}
    async with mini_cluster(tmp_path, *workers) as cluster:
        for worker in cluster.workers.values():
            worker.gate.clear()
        collector = await cluster.add(cluster.request())
        for _ in range(3):
            last = cluster.flight.decode
            workers.remove(last)
            cluster.kill(last)
        error = await failure(cluster, collector)
        assert error.message.startswith(
            f"Worker {last} was killed by SIGKILL; the request has lost its workers 3 times"
        )
        assert cluster[workers.pop()].submitted == []


# --------------------------------------------------------------------------------------------------------- siblings


async def test_siblings_that_stream_go_on_each_for_itself(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].close_gate_after = 12
        request = cluster.request(n=3, max_tokens=20, temperature=0.8, output_kind=RequestOutputKind.FINAL_ONLY)
        collector = await cluster.add(request)
        await until(lambda: cluster["decode-0"].num_tokens >= 12)
        await cluster.join("decode-1")
        cluster.kill("decode-0")
        answer = await read(collector)
        assert answer.tokens == {index: generate(PROMPT, 20) for index in range(3)}
        assert answer.finish_reasons == dict.fromkeys(range(3), "length")
        await until(lambda: cluster.client.dispatcher.trips == {})
        cluster.assert_idle()


async def test_siblings_that_wait_for_a_leader_that_has_to_go_on_elsewhere_get_another(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].gate.clear()
        request = cluster.request(n=3, temperature=0.8, output_kind=RequestOutputKind.FINAL_ONLY, prompt_logprobs=0)
        collector = await cluster.add(request)
        await until(lambda: cluster["decode-0"].first_tokens)
        assert len(cluster["decode-0"].submitted) == 1, "the others wait"
        await cluster.join("decode-1")
        cluster.kill("decode-0")
        answer = await read(collector)
        assert answer.tokens == {index: generate(PROMPT, 5) for index in range(3)}
        legs = [leg.prompt_token_ids for leg in cluster["decode-1"].submitted]
        assert sorted(map(len, legs)) == [40, 41, 42], "one of a follower, the new leader's, and the old one's"
        await until(lambda: cluster.client.dispatcher.trips == {})
        cluster.assert_idle()


async def test_when_one_sibling_fails_all_do(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 30.0
        collector = await cluster.add(cluster.request(n=3, temperature=0.8))
        await until(lambda: len(cluster["decode-0"].submitted) == 3)
        cluster.kill("decode-0")
        await failure(cluster, collector)
