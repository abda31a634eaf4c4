"""A client cannot tell twinpool's replies from a single vLLM server's."""

import concurrent.futures
import json
from collections.abc import Callable

import httpx
import openai
import pytest

from lab.server_process import Server
from tests.engine.golden import Golden, send_as_told
from tests.engine.observed import Watch, counters, wait_until
from tests.engine.raw_cases import RAW_CASES, RawCase, send_raw
from tests.engine.replies import Case, difference, openai_client
from tests.engine.reply_cases import CAPITAL, LETTER, REFUSALS, REPLY_CASES
from tests.engine.servers import CHUNK, MODEL_NAME, http, reset_prefix_caches

pytestmark = pytest.mark.timeout(300)  # the first test of a cluster waits for its start

UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
SMUGGLED = {"mode": "import", "transfer_id": "0" * 32, "exporter": {"worker_id": "prefill-0", "ranks": []}}


@pytest.mark.parametrize("case", REPLY_CASES, ids=lambda case: case.name)
def test_reply_is_a_single_vllm_servers(case: Case, golden: Golden, cluster: Server) -> None:
    theirs = golden.replies[case.name]
    # The case shows what its name says only if the yardstick's own reply does.
    assert theirs.status == 200
    for text in case.checks:
        assert text in json.dumps(theirs.body, ensure_ascii=False)
    watch = Watch(cluster.url, "host")

    ours = send_as_told(cluster, case)
    for _ in range(case.body.get("n", 1) - 1):
        # The choices of one answer are computed in one batch or in two, as it comes, and rounding differs with the
        # batch: now and then a sampled token that was as likely as another one. What is really wrong stays wrong.
        if ours.status == 200 and difference(ours.body, theirs.body, case.logprob_tolerance):
            ours = send_as_told(cluster, case)

    assert ours.status == 200, ours.body
    assert ours.content_type == theirs.content_type
    assert not (found := difference(ours.body, theirs.body, case.logprob_tolerance)), found
    moved = watch.so_far()
    # P computed the prompt; an answer of one token is P's alone, and counts as served by one worker.
    assert moved.prefilled_by_p
    # A stop string found in P's token ends a hand-over that has begun.
    assert moved.recomputed == 0 or "first-token" in case.name


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refusal_is_a_single_vllm_servers_and_reaches_no_worker(case: Case, golden: Golden, cluster: Server) -> None:
    theirs = golden.replies[case.name]
    assert 400 <= theirs.status < 500
    before = counters(cluster.url)

    ours = send_as_told(cluster, case)

    assert (ours.status, ours.content_type) == (theirs.status, theirs.content_type)
    assert not (found := difference(ours.body, theirs.body)), found
    assert _placements(counters(cluster.url)) == _placements(before)


@pytest.mark.parametrize("case", RAW_CASES, ids=lambda case: case.name)
def test_raw_reply_is_a_single_vllm_servers(case: RawCase, golden: Golden, cluster: Server) -> None:
    theirs = golden.raw[case.name]
    reset_prefix_caches(cluster)

    with http(cluster) as client:
        ours = send_raw(client, case)

    streamed = str(theirs.headers["content-type"]).startswith("text/event-stream")
    # Proxies on the way must not hold a stream back; vLLM leaves saying so to others.
    expected = {**theirs.headers, **(UNBUFFERED if streamed else {})}
    assert (ours.status, ours.headers) == (theirs.status, expected)
    assert not (found := difference(ours.body, theirs.body)), found


def _in_completion(body: dict[str, object]) -> tuple[str, dict[str, object]]:
    return "/v1/completions", {"model": MODEL_NAME, "prompt": CAPITAL, **body}


def _in_chat(body: dict[str, object]) -> tuple[str, dict[str, object]]:
    return "/v1/chat/completions", {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], **body}


def _in_response(body: dict[str, object]) -> tuple[str, dict[str, object]]:
    return "/v1/responses", {"model": MODEL_NAME, "input": "Hi", **body}


def _in_messages(body: dict[str, object]) -> tuple[str, dict[str, object]]:
    return "/v1/messages", {
        "model": MODEL_NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], **body,
    }  # fmt: skip


@pytest.mark.parametrize("route", [_in_completion, _in_chat, _in_response, _in_messages])
@pytest.mark.parametrize(
    "smuggling",
    [
        {"kv_transfer_params": SMUGGLED},
        {"kv_transfer_params": {"mode": "export", "transfer_id": "0" * 32}, "stream": True},
        {"vllm_xargs": {"kv_transfer_params": "anything"}},
    ],
    ids=["in-the-body", "in-a-stream", "among-vllm-xargs"],
)
def test_kv_transfer_params_of_a_client_are_refused(
    route: Callable[[dict[str, object]], tuple[str, dict[str, object]]],
    smuggling: dict[str, object],
    cluster: Server,
) -> None:
    path, body = route(smuggling)
    before = counters(cluster.url)

    with http(cluster) as client:
        answer = client.post(path, json=body)

    assert answer.status_code == 400
    assert "kv_transfer_params" in answer.text
    assert _placements(counters(cluster.url)) == _placements(before)


def test_a_hundred_requests_with_one_request_id_get_their_own_answers(cluster: Server) -> None:
    def ask(number: int) -> bool:
        # The model copies the pattern, so that each answer names its own question.
        word = f"{number:03d}"
        prompt = f"key {word} {word} {word} {word} {word} {word}"
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 5, "temperature": 0}
        answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "same-for-all"})
        return answer.status_code == 200 and answer.json()["choices"][0]["text"].strip().startswith(word)

    watch = Watch(cluster.url, "host")
    with http(cluster) as client, concurrent.futures.ThreadPoolExecutor(20) as pool:
        right = list(pool.map(ask, range(100, 200)))

    assert right == [True] * 100
    # While P is busy, D may compute a short prompt itself.
    watch.after_handovers(50)


def test_a_seeded_prompt_of_several_chunks_kills_no_worker(cluster: Server) -> None:
    """A CPU engine of vLLM 0.32 dies of a seeded request whose prompt it computes in several chunks."""
    assert len(LETTER.split()) > CHUNK

    def ask() -> list[str]:
        reset_prefix_caches(cluster)
        with openai_client(cluster) as client:
            reply = client.completions.create(
                model=MODEL_NAME, prompt=LETTER, max_tokens=8, temperature=0.9, seed=5, n=2
            )
        return [choice.text for choice in reply.choices]

    assert ask() == ask(), "the same seed gives the same text"


def test_a_prompt_with_nothing_to_move_is_prefilled_on_d(zmq_cluster: Server) -> None:
    watch = Watch(zmq_cluster.url, "zmq")
    # With `min_tokens` D computes the last prompt token itself, and here there is no other.
    with openai_client(zmq_cluster) as client:
        reply = client.completions.create(
            model=MODEL_NAME, prompt=[504], max_tokens=4, temperature=0, extra_body={"min_tokens": 2}
        )
    assert reply.choices[0].finish_reason == "length"
    moved = watch.so_far()
    assert (moved.local_tokens, moved.remote_tokens, moved.bytes_) == (1, 0, 0)


def test_api_key_is_asked_for(zmq_cluster: Server) -> None:
    with openai_client(zmq_cluster, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with openai_client(zmq_cluster) as client:
        assert [model.id for model in client.models.list().data] == [MODEL_NAME]
    assert httpx.get(f"{zmq_cluster.url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize("place", ["kv_transfer_params", "sampling_params.extra_args"])
def test_token_in_token_out_refuses_kv_transfer_params_too(place: str, zmq_cluster: Server) -> None:
    body: dict[str, object] = {"token_ids": [504, 3575, 282, 4649, 314]}
    if place == "kv_transfer_params":
        body |= {"sampling_params": {"max_tokens": 4}, "kv_transfer_params": SMUGGLED}
    else:
        body |= {"sampling_params": {"max_tokens": 4, "extra_args": {"kv_transfer_params": SMUGGLED}}}
    before = counters(zmq_cluster.url)

    with http(zmq_cluster) as client:
        answer = client.post("/inference/v1/generate", json=body)

    assert answer.status_code == 400, answer.text
    assert _placements(counters(zmq_cluster.url)) == _placements(before)


def test_vllms_own_metrics_stand_beside_ours(cluster: Server) -> None:
    text = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    assert "vllm:time_to_first_token_seconds_count" in text
    assert "vllm:prompt_tokens_total" in text
    for name in (
        "remote_prefill_tokens",
        "local_prefill_tokens",
        "handover_seconds",
        "handover_bytes",
        "kv_blocks",
        "leases",
    ):
        assert f"twinpool_{name}" in text


def test_no_request_is_left_over(cluster: Server) -> None:
    wait_until("no request is open", lambda: counters(cluster.url)["twinpool_requests_open"] == 0, 10)


def _placements(seen: dict[str, float]) -> float:
    return seen.get("twinpool_decisions_total", 0.0)
