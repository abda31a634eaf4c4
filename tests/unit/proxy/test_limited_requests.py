"""Requests over the limit of their API key, on their way through the dispatcher."""

from pathlib import Path

from cluster.configuration.security import RateLimitsConfig
from proxy.middleware.request_context import CURRENT, RequestContext
from proxy.scheduling.slo import PROBE, Standing
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import PROMPT, failure, mini_cluster, read, until


async def test_one_request_too_many_reaches_no_worker_and_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, rate_limits=RateLimitsConfig(requests_per_minute=1)) as cluster:
        await read(await cluster.add(cluster.request()))
        submitted = {worker_id: len(worker.submitted) for worker_id, worker in cluster.workers.items()}
        refusal = await failure(cluster, await cluster.add(cluster.request()))
        assert refusal.http_status == 429
        assert "1 requests per minute; try again in" in refusal.message
        assert {worker_id: len(worker.submitted) for worker_id, worker in cluster.workers.items()} == submitted
        assert cluster.metric("rate_limited_total", limits="default", limit="requests") == 1
        assert cluster.metric("requests_failed_total", status="429", cause="rate_limited") == 1


async def test_tokens_that_were_not_used_are_free_again(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, rate_limits=RateLimitsConfig(tokens_per_minute=200)) as cluster:
        fifth = generate(PROMPT, 5)[4]
        for _ in range(2):  # each reserves 40 + 100 tokens and uses 45
            await read(await cluster.add(cluster.request(max_tokens=100, stop_token_ids=[fifth])))
            await until(lambda: not cluster.client.dispatcher.trips)
        await read(await cluster.add(cluster.request(max_tokens=70, stop_token_ids=[fifth])))
        refusal = await failure(cluster, await cluster.add(cluster.request(max_tokens=71)))
        assert "200 tokens per minute" in refusal.message


async def test_all_choices_of_an_answer_are_one_request(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, rate_limits=RateLimitsConfig(requests_per_minute=1)) as cluster:
        answer = await read(await cluster.add(cluster.request(n=3, temperature=1.0)))
        assert len(answer.tokens) == 3
        refusal = await failure(cluster, await cluster.add(cluster.request(n=3, temperature=1.0)))
        assert refusal.http_status == 429


async def test_the_proxys_own_requests_are_not_limited(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, rate_limits=RateLimitsConfig(requests_per_minute=1)) as cluster:
        await read(await cluster.add(cluster.request()))
        token = CURRENT.set(RequestContext(Standing(PROBE)))
        try:
            await read(await cluster.add(cluster.request()))
        finally:
            CURRENT.reset(token)
