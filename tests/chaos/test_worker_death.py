"""A worker that is killed or drained costs nobody anything where another can take its place, and else an error.

Each end meets four requests at once: one that decodes, one whose blocks are being handed over, one whose
prompt P computes, and one that waits in P's queue. Whoever goes on at another worker gets the tokens that it would
have got; only where two tokens were a tie may rounding tell the two apart.
"""

import asyncio
import json
import time
from dataclasses import dataclass

import httpx
import pytest

from lab.server_process import wait_for_no_process
from tests.chaos.conftest import REPLICAS, PromptMaker
from tests.chaos.spares import SparedCluster
from tests.engine.observed import Watch, counters, wait_until, worker
from tests.engine.servers import MODEL_NAME, http, reset_prefix_caches
from tests.engine.token_cases import generate, margins

pytestmark = pytest.mark.timeout(300)  # the first test waits for the start of seven engines

TIE = 0.25
"""bf16 logits of this size come in steps of an eighth: two steps may be rounding."""
ERROR_WITHIN_S = 5.0
DONE_WITHIN_S = 40.0
BACK_WITHIN_S = 10.0

STAGES = {
    # Stage when the worker dies: article, prompt tokens, tokens to generate.
    "decoding": (2001, 40, 60),
    "handing over": (2002, 300, 8),
    "computing": (2003, 700, 8),
    "queued": (2004, 250, 8),
}


@dataclass
class Fate:
    """How one request ended."""

    token_ids: list[int]
    finish_reason: str | None = None
    error: str = ""
    status: int = 200
    ended_s: float = 0.0


@dataclass
class Exact:
    """An undisturbed answer, and by how much each of its tokens beat the next best."""

    token_ids: list[int]
    margins: list[float]

    def allows(self, token_ids: list[int]) -> bool:
        """Every token is right, up to the first tie that fell the other way."""
        pairs = zip(token_ids, self.token_ids, strict=False)
        differs = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        return differs is None or self.margins[differs] <= TIE


async def _follow(url: str, prompt: list[int], max_tokens: int, fate: Fate) -> Fate:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    async with (
        httpx.AsyncClient(base_url=url, timeout=DONE_WITHIN_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        fate.status = answer.status_code
        if fate.status != 200:
            fate.error = (await answer.aread()).decode()
        else:
            async for line in answer.aiter_lines():
                _take(fate, line)
    fate.ended_s = time.monotonic()
    return fate


def _take(fate: Fate, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        fate.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        fate.token_ids += choice["token_ids"] or []
        fate.finish_reason = choice["finish_reason"] or fate.finish_reason


async def _until_tokens(fate: Fate, number: int) -> None:
    what = f"{number} tokens came"
    await asyncio.to_thread(wait_until, what, lambda: len(fate.token_ids) >= number, 20.0, 0.01)


def _wait_for_decisions(url: str, before: dict[str, float], number: int) -> None:
    """Until the proxy has decided on so many requests; fails if a decode worker is to compute one of them."""
    name = "twinpool_decisions_total"

    def since() -> dict[str, float]:
        return {key: value - before.get(key, 0.0) for key, value in counters(url).items() if key.startswith(name)}

    wait_until(f"{number} requests were decided on", lambda: since().get(name, 0.0) >= number, 20.0, 0.05)
    made = {key: count for key, count in since().items() if count}
    assert not any('placement="local"' in key for key in made), made


def _prompts(make_prompt: PromptMaker) -> dict[str, list[int]]:
    return {stage: make_prompt(article, length) for stage, (article, length, _) in STAGES.items()}


@pytest.fixture(scope="session")
def exact(spared_cluster: SparedCluster, make_prompt: PromptMaker) -> dict[str, Exact]:
    """What each request gets when nobody dies."""
    spared_cluster.pair()
    found = {}
    for stage, prompt in _prompts(make_prompt).items():
        token_ids = _alone(spared_cluster, prompt, STAGES[stage][2])
        with http(spared_cluster.server) as client:
            found[stage] = Exact(token_ids, margins(client, prompt, STAGES[stage][2]))
    return found


async def _end_and_see(
    cluster: SparedCluster, role: str, kind: str, make_prompt: PromptMaker, exact: dict[str, Exact]
) -> None:
    prefill, decode = await asyncio.to_thread(cluster.pair)
    victim, survivor = (prefill, decode) if role == "prefill" else (decode, prefill)
    prompts = _prompts(make_prompt)
    await asyncio.to_thread(reset_prefix_caches, cluster.server)
    wait_until("both workers are idle", lambda: cluster.whole(prefill) and cluster.whole(decode), BACK_WITHIN_S)

    fates = {stage: Fate([]) for stage in STAGES}
    tasks = {}

    def send(stage: str) -> None:
        tasks[stage] = asyncio.create_task(_follow(cluster.url, prompts[stage], STAGES[stage][2], fates[stage]))

    send("decoding")
    await _until_tokens(fates["decoding"], 5)
    # With D's rank frozen P still ends the second prompt and its token comes, while nobody fetches the blocks.
    with cluster.frozen_rank(decode):
        send("handing over")
        await _until_tokens(fates["handing over"], 1)
        other = await asyncio.to_thread(cluster.thaw, role)
        with cluster.frozen_rank(prefill):  # so that it does not matter how fast this machine computes
            before = await asyncio.to_thread(counters, cluster.url)
            send("computing")
            send("queued")
            await asyncio.to_thread(_wait_for_decisions, cluster.url, before, 2)
            assert [len(fates[stage].token_ids) for stage in ("computing", "queued")] == [0, 0], fates
            assert not any(task.done() for task in tasks.values()), fates
            ended_s = time.monotonic()
            cluster.end(victim, kind)
    await asyncio.wait(tasks.values(), timeout=DONE_WITHIN_S)

    # Decode workers prefill as well; nobody decodes in their place.
    is_replaced = bool(other) or role == "prefill"
    for stage, task in tasks.items():
        fate = fates[stage]
        assert task.done(), f"{stage}: no end within {DONE_WITHIN_S} s, {fate}"
        task.result()
        if is_replaced:
            assert not fate.error, f"{stage}: {fate}"
            assert fate.finish_reason == "length", f"{stage}: {fate}"
            assert len(fate.token_ids) == STAGES[stage][2], f"{stage}: {fate}"
        elif fate.error:
            assert fate.ended_s - ended_s < ERROR_WITHIN_S, f"{stage}: {fate}"
            causes = (victim, f"No {role} worker is alive")
            assert any(cause in fate.error for cause in causes), f"{stage}: the error does not name the cause: {fate}"
            assert fate.status in (200, 500, 502, 503), f"{stage}: {fate}"
            assert fate.finish_reason is None, f"{stage}: {fate}"
        else:
            assert fate.finish_reason == "length", f"{stage}: neither an error nor the whole answer: {fate}"
        assert exact[stage].allows(fate.token_ids), f"{stage}: {fate}, undisturbed {exact[stage]}"
    for worker_id in filter(None, (survivor, other)):
        wait_until(f"{worker_id} is whole", lambda w=worker_id: cluster.whole(w), BACK_WITHIN_S)
        assert worker(cluster.url, worker_id).state == "ready"
    gone = "drained" if kind == "drain" else "dead"
    wait_until(f"{victim} is {gone}", lambda: worker(cluster.url, victim).state == gone, BACK_WITHIN_S)
    assert worker(cluster.url, victim).cause, "the status says why"
    wait_until(f"nothing of {victim} is left", lambda: not cluster.processes_of(victim), BACK_WITHIN_S)


def _alone(cluster: SparedCluster, prompt: list[int], max_tokens: int) -> list[int]:
    with http(cluster.server) as client:
        return generate(client, prompt, max_tokens, stream=False).token_ids


async def test_idle_workers_share_what_comes_at_once(spared_cluster: SparedCluster, make_prompt: PromptMaker) -> None:
    """The first test of this cluster: later ones freeze all workers but two."""
    prompts = [make_prompt(2020 + i, 40) for i in range(12)]

    fates = await asyncio.gather(*(_follow(spared_cluster.url, prompt, 8, Fate([])) for prompt in prompts))

    assert [len(fate.token_ids) for fate in fates] == [8] * 12
    fetched = {f'twinpool_worker_bytes_in{{link="host",worker="decode-{i}"}}' for i in range(REPLICAS["decode"])}
    wait_until("all decode workers fetched blocks", lambda: fetched <= counters(spared_cluster.url).keys(), 5)


@pytest.mark.parametrize("kind", ["drain", "host", "core"])
async def test_end_of_a_prefill_worker(
    kind: str, spared_cluster: SparedCluster, make_prompt: PromptMaker, exact: dict[str, Exact]
) -> None:
    await _end_and_see(spared_cluster, "prefill", kind, make_prompt, exact)


def test_without_a_prefill_worker_d_does_it_alone(spared_cluster: SparedCluster, make_prompt: PromptMaker) -> None:
    prompt = make_prompt(2010, 300)
    watch = Watch(spared_cluster.url, "host")
    _alone(spared_cluster, prompt, 8)
    # Several chunks and a seed: what kills a CPU engine of plain vLLM 0.32.
    seeded = {"model": MODEL_NAME, "prompt": prompt[::-1], "max_tokens": 4, "temperature": 0.9, "seed": 3}
    assert httpx.post(f"{spared_cluster.url}/v1/completions", json=seeded, timeout=30).status_code == 200
    assert watch.so_far().remote_tokens == 0


def test_a_decode_worker_takes_the_other_role(spared_cluster: SparedCluster, make_prompt: PromptMaker) -> None:
    prompt = make_prompt(2011, 300)
    alone = _alone(spared_cluster, prompt, 8)
    changing = spared_cluster.thaw("decode")

    order = httpx.post(f"{spared_cluster.url}/twinpool/workers/{changing}/role", json={"role": "prefill"}, timeout=30)
    assert order.status_code < 300, order.text
    wait_until(f"{changing} prefills", lambda: worker(spared_cluster.url, changing).role == "prefill", BACK_WITHIN_S)

    reset_prefix_caches(spared_cluster.server)
    watch = Watch(spared_cluster.url, "host")
    assert _alone(spared_cluster, prompt, 8) == alone
    moved = watch.after_handovers()
    assert moved.remote_tokens == 300
    assert moved.bytes_ > 0


@pytest.mark.parametrize("kind", ["host", "drain", "rank"])
async def test_end_of_a_decode_worker(
    kind: str, spared_cluster: SparedCluster, make_prompt: PromptMaker, exact: dict[str, Exact]
) -> None:
    """The last one has nobody to take its place."""
    await _end_and_see(spared_cluster, "decode", kind, make_prompt, exact)


def test_without_a_decode_worker_requests_are_refused_with_the_reason(spared_cluster: SparedCluster) -> None:
    spared_cluster.kill_all("decode")

    body = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 4}
    answer = httpx.post(f"{spared_cluster.url}/v1/completions", json=body, timeout=10)

    assert answer.status_code == 503
    assert "decode" in answer.json()["error"]["message"]


def test_a_killed_launcher_leaves_no_process(spared_cluster: SparedCluster) -> None:
    """The last test of this cluster: frozen spares and all."""
    spared_cluster.server.process.kill()
    assert wait_for_no_process(spared_cluster.server.mark, 20.0) == {}
