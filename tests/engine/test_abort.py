"""A client that leaves frees every block on both sides, wherever its request was."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import httpx
import psutil
import pytest

from lab.server_process import Server
from tests.engine.conftest import PromptMaker
from tests.engine.observed import status, wait_until, worker
from tests.engine.servers import CONTEXT, DECODE_SEQUENCES, MODEL_NAME, http
from tests.engine.token_cases import generate

pytestmark = pytest.mark.timeout(300)  # the first test of a cluster waits for its start

ABORTS = 24
TWO_BEATS_AND_A_REPORT_S = 4.0
"""Heartbeats are a second apart; the report that shows the result is one more, and so is the poll's slack."""


@pytest.fixture(params=["cluster", "zmq_cluster"], ids=["host", "zmq"])
def either_cluster(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


@contextlib.contextmanager
def full_capacity_returns(server: Server) -> Iterator[None]:
    """Both workers are idle and whole before, and soon after, what happens inside."""
    wait_until("the cluster is idle", lambda: _not_whole(server) == "", 10)
    yield
    try:
        wait_until("all is free", lambda: _not_whole(server) == "", TWO_BEATS_AND_A_REPORT_S)
    except TimeoutError:
        pytest.fail(f"{TWO_BEATS_AND_A_REPORT_S} s after the last abort: {_not_whole(server)}")
    with http(server) as client:
        assert len(generate(client, [504] * (CONTEXT // 2), 3, stream=False).token_ids) == 3


def _not_whole(server: Server) -> str:
    """What is not free or still open; every moment's blocks must add up."""
    seen = status(server.url)
    for item in seen.workers:
        blocks = item.blocks
        assert blocks.free + blocks.used + blocks.leased == blocks.total, item
        if not blocks.total:
            return f"{item.worker_id} has not reported its blocks yet"
        if blocks.free != blocks.total or item.exports_open or item.imports_open or item.running or item.waiting:
            return str(item)
    if seen.requests_running or seen.requests_waiting:
        return f"{seen.requests_running} requests run and {seen.requests_waiting} wait in the proxy"
    return ""


@contextlib.asynccontextmanager
async def _client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """One client for many streams: making one takes longer than some requests here."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers, limits=limits) as client:
        yield client


async def _leave_after(
    client: httpx.AsyncClient, prompt: list[int], num_tokens: int, leave: asyncio.Event | None = None
) -> int:
    """Reads `num_tokens` chunks, waits for `leave` if given, and closes the connection; returns how many came."""
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": 1500, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    came = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        async for line in lines:
            came += line.startswith("data: {")
            if came >= num_tokens:
                break
        if leave is not None:
            await leave.wait()
    return came


async def _leave_without_a_token(client: httpx.AsyncClient, prompt: list[int], when: Awaitable[object]) -> bool:
    """Sends a request and leaves when `when` is over; False if a token came before."""
    request = asyncio.create_task(_leave_after(client, prompt, 1))
    await when
    came = request.done()
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    return not came


async def _until(holds: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, what, holds, 10.0)


def _rank_of(server: Server, worker_id: str) -> int:
    """Process id of the worker's only rank."""
    children = psutil.Process(worker(server.url, worker_id).pid).children(recursive=True)
    ranks = [child.pid for child in children if "VLLM::Worker" in " ".join(child.cmdline())]
    assert len(ranks) == 1, [child.cmdline() for child in children]
    return ranks[0]


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_leaving_while_queued_for_p(cluster: Server, make_prompt: PromptMaker) -> None:
    rank = _rank_of(cluster, "prefill-0")
    with full_capacity_returns(cluster):
        async with _client(cluster) as client:
            # With its rank frozen P takes a few and computes none; the others wait in the proxy.
            with _frozen(rank):
                prompts = [make_prompt(801 + i, 40) for i in range(ABORTS)]
                all_wait = asyncio.Event()
                leavers = [asyncio.create_task(_leave_without_a_token(client, it, all_wait.wait())) for it in prompts]
                await _until(lambda: status(cluster.url).requests_waiting >= ABORTS // 2, "requests wait in the proxy")
                assert status(cluster.url).requests_running > 0, "some are at P"
                all_wait.set()
                assert await asyncio.gather(*leavers) == [True] * ABORTS


async def test_leaving_while_p_computes(cluster: Server, make_prompt: PromptMaker) -> None:
    rng = random.Random(5)
    with full_capacity_returns(cluster):
        async with _client(cluster) as client:
            for i in range(ABORTS):
                # About a second of prefill, in four chunks.
                when = asyncio.sleep(rng.uniform(0.02, 0.5))
                assert await _leave_without_a_token(client, make_prompt(1000 + i, 700), when)


async def test_leaving_between_p_and_d(either_cluster: Server, make_prompt: PromptMaker) -> None:
    server = either_cluster
    rank = _rank_of(server, "decode-0")
    with full_capacity_returns(server):
        async with _client(server) as client:
            for first in range(0, ABORTS, DECODE_SEQUENCES):
                # D's rank is frozen: P ends and its token reaches the client, while the blocks cannot be fetched.
                prompts = [make_prompt(1100 + first + i, 30) for i in range(DECODE_SEQUENCES)]
                with _frozen(rank):
                    for prompt in prompts:  # one by one: for a busy P, D would compute a short prompt itself
                        assert await asyncio.wait_for(_leave_after(client, prompt, 1), 10) == 1


async def test_leaving_at_the_first_token(either_cluster: Server, make_prompt: PromptMaker) -> None:
    with full_capacity_returns(either_cluster):
        async with _client(either_cluster) as client:
            for i in range(ABORTS):
                assert await _leave_after(client, make_prompt(1200 + i, 140), 1) == 1


async def test_leaving_while_queued_for_d(cluster: Server, make_prompt: PromptMaker) -> None:
    with full_capacity_returns(cluster):
        async with _client(cluster) as client:
            # D takes eight requests at a time; these eight decode until they are told to leave.
            leave = asyncio.Event()
            full = [
                asyncio.create_task(_leave_after(client, make_prompt(1300 + i, 20), 3, leave))
                for i in range(DECODE_SEQUENCES)
            ]
            await _until(lambda: worker(cluster.url, "decode-0").running >= DECODE_SEQUENCES, "D is full")
            all_wait = asyncio.Event()
            prompts = [make_prompt(1320 + i, 20) for i in range(ABORTS)]
            leavers = [asyncio.create_task(_leave_without_a_token(client, it, all_wait.wait())) for it in prompts]
            await _until(lambda: status(cluster.url).requests_waiting == ABORTS, "requests wait for a place at D")
            all_wait.set()
            assert await asyncio.gather(*leavers) == [True] * ABORTS
            assert worker(cluster.url, "decode-0").running >= DECODE_SEQUENCES, "D was full all the time"
            leave.set()
            assert await asyncio.gather(*full) == [3] * DECODE_SEQUENCES


async def test_leaving_while_d_decodes(cluster: Server, make_prompt: PromptMaker) -> None:
    rng = random.Random(6)
    with full_capacity_returns(cluster):
        async with _client(cluster) as client:
            for first in range(0, ABORTS, 8):
                leavers = (
                    _leave_after(client, make_prompt(1400 + first + i, 20), rng.randrange(3, 8)) for i in range(8)
                )
                assert min(await asyncio.gather(*leavers)) >= 3


async def test_a_non_streaming_client_that_leaves_frees_its_blocks_too(
    cluster: Server, make_prompt: PromptMaker
) -> None:
    rng = random.Random(7)
    with full_capacity_returns(cluster):
        async with _client(cluster) as client:
            for i in range(ABORTS // 2):
                body = {
                    "model": MODEL_NAME,
                    "prompt": make_prompt(1500 + i, 200),
                    "max_tokens": 300,
                    "ignore_eos": True,
                }
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0.05, 0.8)):
                        await client.post("/v1/completions", json=body)
                        pytest.fail("300 tokens came in less than a second")


def test_no_lease_ran_out(cluster: Server) -> None:
    # Whatever ended early was aborted by someone who said so.
    assert set(status(cluster.url).transfer_failures) <= {"aborted"}
