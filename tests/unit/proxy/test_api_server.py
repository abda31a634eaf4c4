"""vLLM's whole API server on fake workers: what clients see, and how starting can fail."""

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from cluster.config import ClusterConfig, LivenessConfig
from cluster.configuration.slo import SloConfig
from cluster.status import ClusterStatus
from proxy.api_server import run_api_server
from proxy.metrics import ProxyMetrics
from proxy.middleware.request_standing import find_standings
from proxy.slo.rules import SloRules
from proxy.supervision import ProxyStartError
from proxy.workers.arrival import expected_workers, wait_for_workers
from proxy.workers.roster import Roster
from proxy.workers.worker_pool import WorkerPool
from tests.unit.proxy.fake_worker import Exchange, FakeWorker, generate
from tests.unit.proxy.mini_cluster import until
from tests.unit.proxy.tiny_model import make_tiny_model

MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")
WORDS = " ".join(f"w{n}" for n in range(10, 30))
PROMPT = list(range(10, 30))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Gone:
    worker_id: str
    cause: str
    drained: bool = False
    returns: bool = False


CONTEXTS = {"prefill-0": 512, "decode-0": 480}
"""Tokens; the shorter one holds for every request."""


@dataclass
class Server:
    """A server that is up, and the fake workers behind it."""

    url: str
    config: ClusterConfig
    workers: dict[str, FakeWorker]
    address: str
    exchange: Exchange
    exits: "asyncio.Queue[Any]"
    model: str

    async def post(self, path: str, **body: Any) -> tuple[int, str, Any]:
        """Status, content type and body of a request."""
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body) as response:
            return response.status, response.headers["content-type"], await response.text()

    async def revive(self, worker_id: str) -> None:
        """A new life of a worker."""
        if worker_id in self.workers:
            await self.workers[worker_id].stop()
        worker = FakeWorker(worker_id, self.address, self.exchange, model=self.model)
        self.workers[worker_id] = await worker.start()
        await asyncio.wait_for(worker.welcomed.wait(), 5)


def make_config(port: int, **changes: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "served_model_name": "tiny",
            "engine": {"max_model_len": 512, "dtype": "bfloat16"},
            "server": {"port": port, "options": {"enable_prompt_tokens_details": True}},
            "scheduling": {"remote_prefill_min_tokens": 4},
            "liveness": {"heartbeat_s": 0.05, "dead_after_s": 0.5},
            "slo": {"classes": {"gold": {"api_keys": "key-1"}, "batch": {"ttft_s": 9, "models": "tiny-batch"}}},
            **changes,
        }
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    model = str(make_tiny_model(directory / "model"))
    address = f"ipc://{directory}/proxy"
    config = make_config(free_port())
    exits: asyncio.Queue[Any] = asyncio.Queue()
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_ready(ready_url: str) -> None:
        url.set_result(ready_url)

    serving = asyncio.create_task(run_api_server(config, model, address, on_ready, exits, stop))
    running = Server("", config, {}, address, Exchange(), exits, model)
    for worker_id in expected_workers(config):
        running.workers[worker_id] = await FakeWorker(
            worker_id, address, running.exchange, model=model, max_model_len=CONTEXTS[worker_id]
        ).start()
    await asyncio.wait((serving, url), return_when=asyncio.FIRST_COMPLETED, timeout=50)
    running.url = url.result() if url.done() else str(serving.result())
    yield running
    stop.set()
    await asyncio.wait_for(serving, 10)
    for worker in running.workers.values():
        await worker.stop()


@MODULE_LOOP
async def test_it_is_ready_only_after_a_request_went_through_both_pools(server: Server) -> None:
    assert len(server.workers["prefill-0"].submitted) >= 1
    assert len(server.workers["decode-0"].submitted) >= 1


@MODULE_LOOP
async def test_the_openai_client_gets_its_answer(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    answer = await client.completions.create(model="tiny", prompt=WORDS, max_tokens=6, n=2)
    words = "".join(f"w{token}" for token in generate(PROMPT, 6))
    assert [choice.text for choice in answer.choices] == [words, words]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    chunks = [c async for c in await client.completions.create(model="tiny", prompt=WORDS, max_tokens=6, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == words
    await client.close()


@MODULE_LOOP
async def test_a_stream_is_sent_unbuffered(server: Server) -> None:
    body = {"model": "tiny", "prompt": WORDS, "max_tokens": 3, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert (await response.text()).endswith("data: [DONE]\n\n")


@MODULE_LOOP
@pytest.mark.parametrize("stream", [False, True])
async def test_transfer_parameters_from_a_client_are_400(server: Server, stream: bool) -> None:
    status, content_type, text = await server.post(
        "/v1/completions", model="tiny", prompt=WORDS, kv_transfer_params={"mode": "import"}, stream=stream
    )
    assert status == 400
    assert content_type.startswith("application/json")
    assert json.loads(text)["error"]["param"] == "kv_transfer_params"


@MODULE_LOOP
async def test_an_unknown_path_is_answered_with_the_known_ones(server: Server) -> None:
    status, _, text = await server.post("/v1/completion", model="tiny", prompt=WORDS)
    assert status == 404
    message = json.loads(text)["error"]["message"]
    assert message.startswith("POST /v1/completion is not served here; what is: /v1/chat/completions")
    assert "/v1/responses" in message
    status, _, text = await server.post("/v1/responses/resp_1/cancel")
    assert status == 404
    assert "resp_1" in json.loads(text)["error"]["message"], "vLLM's own 404"


@MODULE_LOOP
@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_turned_away_is_told_at_once_and_when_to_come_back(server: Server, stream: bool) -> None:
    for worker_id in ("decode-0", "prefill-0"):
        server.workers[worker_id].freeze()
        await server.exits.put(Gone(worker_id, f"worker {worker_id} died"))
    await until(server.exits.empty)
    body = {"model": "tiny", "prompt": WORDS, "stream": stream}
    start_s = time.monotonic()
    async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as response:
        took_s = time.monotonic() - start_s
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "No decode worker is alive" in (await response.json())["error"]["message"]
    assert took_s < 0.1
    async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as response:
        assert response.status == 503
    await server.revive("prefill-0")
    await server.revive("decode-0")


async def test_who_has_no_valid_key_learns_nothing_about_classes() -> None:
    app = FastAPI()
    app.add_middleware(AuthenticationMiddleware, tokens=["good"])
    app.middleware_stack = app.build_middleware_stack()
    find_standings(app, SloRules(SloConfig()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://cluster") as client:
        for key, status in (("bad", 401), ("good", 400)):
            headers = {"X-Slo-Class": "god", "Authorization": f"Bearer {key}"}
            assert (await client.post("/v1/completions", headers=headers)).status_code == status


@MODULE_LOOP
async def test_the_class_of_a_request_comes_from_header_key_or_model(server: Server) -> None:
    body = {"model": "tiny", "prompt": WORDS, "max_tokens": 2}
    async with aiohttp.ClientSession(server.url) as session:

        async def ask(model: str = "tiny", **headers: str) -> tuple[int, str]:
            asked = session.post("/v1/completions", json={**body, "model": model}, headers=headers)
            async with asked as response:
                return response.status, await response.text()

        assert (await ask(model="tiny-batch"))[0] == 200, "a class's further name is served"
        assert (await ask(Authorization="Bearer key-1"))[0] == 200
        status, text = await ask(**{"X-Slo-Class": "god"})
        assert status == 400
        assert "use one of: default, batch" in json.loads(text)["error"]["message"]
        assert (await ask(**{"X-Slo-Class": "gold"}))[0] == 403


@MODULE_LOOP
async def test_what_vllm_refuses_reaches_no_worker(server: Server) -> None:
    before = [len(worker.submitted) for worker in server.workers.values()]
    too_long, _, text = await server.post("/v1/completions", model="tiny", prompt=list(range(3, 498)), max_tokens=1)
    assert f"maximum context length is {min(CONTEXTS.values())} tokens" in text, "no worker may find it too long later"
    unknown, _, _ = await server.post("/v1/completions", model="other", prompt=WORDS)
    bad, _, _ = await server.post("/v1/completions", model="tiny", prompt=WORDS, temperature=-1)
    assert (too_long, unknown, bad) == (400, 404, 400)
    assert [len(worker.submitted) for worker in server.workers.values()] == before


ODD_BODIES = {
    "nothing": b"",
    "null": b"null",
    "nested deeper than a stack": b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "not utf-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"model": "tiny", "prompt": "w1 \\ud800 w2"}',
    "numbers beyond 64 bits": b'{"model": "tiny", "prompt": [5, 99999999999999999999999]}',
    "not a number": b'{"model": "tiny", "prompt": "w1", "top_p": NaN}',
    "a longer prompt than any context": b'{"model": "tiny", "prompt": [' + b"5," * 200_000 + b"5]}",
    "more choices than anybody can read": b'{"model": "tiny", "prompt": "w1", "n": 1000000}',
    "packed without saying so": gzip.compress(b'{"model": "tiny", "prompt": "w1"}'),
}


@MODULE_LOOP
@pytest.mark.parametrize("odd", ODD_BODIES)
async def test_whatever_a_body_holds_it_is_the_clients_error_and_reaches_no_worker(server: Server, odd: str) -> None:
    before = [len(worker.submitted) for worker in server.workers.values()]
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession(server.url, headers=headers) as session,
        session.post("/v1/completions", data=ODD_BODIES[odd]) as response,
    ):
        assert response.status == 400
        assert response.headers["content-type"].startswith("application/json")
        assert await response.json()
    assert [len(worker.submitted) for worker in server.workers.values()] == before


@MODULE_LOOP
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": WORDS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
        ("/v1/responses", {"input": WORDS}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_worker_that_is_killed_is_an_error_that_names_it(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    decode = server.workers["decode-0"]
    decode.step_s = 0.02
    limit = {"max_output_tokens": 300} if path == "/v1/responses" else {"max_tokens": 300}
    before = len(decode.submitted)
    asked = asyncio.create_task(server.post(path, model="tiny", stream=stream, **body, **limit))
    await until(lambda: len(decode.submitted) > before)
    await asyncio.sleep(0.1)
    decode.freeze()
    await server.exits.put(Gone("decode-0", "worker decode-0 was killed by SIGKILL"))
    status, _, text = await asyncio.wait_for(asked, 2)
    assert "Worker decode-0 was killed by SIGKILL" in text
    assert '"finish_reason":"stop"' not in text
    if stream:
        assert text.rstrip().split("\n\n")[-1].split("data: ")[-1].startswith("{")
        assert "[DONE]" not in text
    else:
        assert status == 503
    await server.revive("decode-0")


@MODULE_LOOP
async def test_a_stream_that_fails_before_its_first_token_is_a_503(server: Server) -> None:
    prefill, decode = server.workers["prefill-0"], server.workers["decode-0"]
    prefill.gate.clear()
    asked = asyncio.create_task(server.post("/v1/completions", model="tiny", prompt=WORDS, stream=True))
    await until(lambda: prefill.running)
    decode.freeze()
    prefill.freeze()
    await server.exits.put(Gone("decode-0", "worker decode-0 died"))
    await server.exits.put(Gone("prefill-0", "worker prefill-0 died"))
    status, content_type, text = await asyncio.wait_for(asked, 2)
    assert status == 503
    assert content_type.startswith("application/json")
    assert json.loads(text)["error"]["code"] == 503
    await server.revive("prefill-0")
    await server.revive("decode-0")


@MODULE_LOOP
async def test_a_client_that_disconnects_frees_both_workers(server: Server) -> None:
    decode = server.workers["decode-0"]
    decode.step_s = 0.02
    before = len(decode.submitted)
    body = {"model": "tiny", "prompt": WORDS, "max_tokens": 400, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as response:
        await response.content.readany()
    await until(lambda: len(decode.submitted) > before and not decode.running)
    decode.step_s = 0.0


@MODULE_LOOP
async def test_the_status_is_what_the_command_line_reads(server: Server) -> None:
    await server.post("/v1/completions", model="tiny", prompt=WORDS, max_tokens=4)
    async with aiohttp.ClientSession() as session, session.get(server.url + "/twinpool/status") as response:
        status = msgspec.json.decode(await response.read(), type=ClusterStatus)
    assert status.model == "tiny"
    assert [(w.worker_id, w.role, w.state) for w in status.workers] == [
        ("prefill-0", "prefill", "ready"),
        ("decode-0", "decode", "ready"),
    ]
    assert status.last_request is not None
    assert status.last_request.prompt_tokens == len(PROMPT)
    assert status.last_request.bytes_moved == 1024
    assert status.last_request.outcome == "loaded"
    assert [link.link for link in status.links] == ["host"]
    assert status.transfers["loaded"] >= 1


@MODULE_LOOP
async def test_probes_see_health_and_readiness(server: Server) -> None:
    async def probe(path: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
            return response.status, json.loads(await response.text())

    assert await probe("/health") == (200, {"status": "healthy"}), "vLLM's own route has no body"
    before = len(server.workers["decode-0"].submitted)
    assert await probe("/ready") == (200, {"status": "ready"})
    assert len(server.workers["decode-0"].submitted) == before, "clients' requests have shown it"
    server.workers["prefill-0"].freeze()
    await server.exits.put(Gone("prefill-0", "worker prefill-0 died"))
    await until(lambda: server.exits.empty())
    await asyncio.sleep(0.01)
    assert await probe("/ready") == (503, {"status": "not ready", "reasons": ["no prefill worker takes requests"]})
    assert (await probe("/health"))[0] == 200
    await server.revive("prefill-0")


@MODULE_LOOP
async def test_our_metrics_stand_beside_vllms(server: Server) -> None:
    await server.post("/v1/completions", model="tiny", prompt=WORDS, max_tokens=4)
    async with aiohttp.ClientSession() as session, session.get(server.url + "/metrics") as response:
        text = await response.text()
    for name in (
        "twinpool_remote_prefill_tokens_total",
        'twinpool_decisions_total{placement="remote",reason="remote"}',
        "twinpool_handover_seconds_bucket",
        'twinpool_handover_bytes_total{link="host"}',
        'twinpool_kv_blocks{state="free",worker="decode-0"}',
        'twinpool_workers_alive{role="prefill"} 1.0',
        'twinpool_slo_requests_total{outcome="attained",slo_class="default"}',
        'twinpool_itl_seconds_bucket{le="0.1",slo_class="default"}',
        'twinpool_ttft_part_seconds_count{part="front_end"}',
        "vllm:num_requests_running",
    ):
        assert name in text


# ------------------------------------------------------------------------------------------------------- starting


async def never_ready(_url: str) -> None:
    raise AssertionError("it must not become ready")


async def start(tmp_path: Path, config: ClusterConfig, model: str) -> None:
    await asyncio.wait_for(
        run_api_server(config, model, f"ipc://{tmp_path}/proxy", never_ready, asyncio.Queue(), asyncio.Event()), 50
    )


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = make_config(taken.getsockname()[1])
        with pytest.raises(ProxyStartError, match=r"cannot listen on 127.0.0.1:\d+ \(server.host, server.port\)"):
            await start(tmp_path, config, str(make_tiny_model(tmp_path / "model")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": {"options": {"no_such_flag": 1}}}, "server.options.no_such_flag"),
        ({"engine": {"max_model_len": 100_000}}, "vLLM refuses the model or the engine options"),
        ({"server": {"options": {"enable_auto_tool_choice": True}}}, "tool-call-parser"),
    ],
)
async def test_an_option_that_vllm_refuses_is_named(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ProxyStartError, match=message):
        await start(tmp_path, make_config(free_port(), **changes), str(make_tiny_model(tmp_path / "model")))


async def test_stopping_before_anybody_came_ends_the_start(tmp_path: Path) -> None:
    stop = asyncio.Event()
    model = str(make_tiny_model(tmp_path / "model"))
    config, address = make_config(free_port()), f"ipc://{tmp_path}/proxy"
    serving = asyncio.create_task(run_api_server(config, model, address, never_ready, asyncio.Queue(), stop))
    await asyncio.sleep(0.01)
    stop.set()
    await asyncio.wait_for(serving, 5)


async def waiting_pool(tmp_path: Path) -> WorkerPool:
    roster = Roster(frozenset({"m"}), 5.0, ("prefill-0", "decode-0"))
    return WorkerPool(f"ipc://{tmp_path}/proxy", roster, LivenessConfig(), ProxyMetrics(CollectorRegistry()))


async def test_who_did_not_come_in_time_is_named(tmp_path: Path) -> None:
    pool = await waiting_pool(tmp_path)
    worker = await FakeWorker("decode-0", pool.address, Exchange(), model="m").start()
    with pytest.raises(ProxyStartError, match=r"prefill-0 did not come up within 0.3 s \(start_timeout_s\)"):
        await wait_for_workers(pool, 0.3)
    await worker.stop()
    pool.close()


async def test_a_role_that_died_ends_the_start_at_once_with_its_cause(tmp_path: Path) -> None:
    pool = await waiting_pool(tmp_path)
    asyncio.get_running_loop().call_later(0.05, pool.give_up, "prefill-0", "Worker prefill-0 ran out of memory")
    with pytest.raises(ProxyStartError, match="prefill-0: Worker prefill-0 ran out of memory"):
        await asyncio.wait_for(wait_for_workers(pool, 30), 3)
    pool.close()


async def test_workers_that_cannot_be_paired_are_told_apart_by_their_fields(tmp_path: Path) -> None:
    pool = await waiting_pool(tmp_path)
    workers = [
        await FakeWorker(worker_id, pool.address, Exchange(), model="m", fingerprint=fingerprint).start()
        for worker_id, fingerprint in (("prefill-0", "f1"), ("decode-0", "f2"))
    ]
    with pytest.raises(ProxyStartError, match=r"they differ in \(prefill / decode\): layout \(f1 / f2\)"):
        await asyncio.wait_for(wait_for_workers(pool, 30), 3)
    for worker in workers:
        await worker.stop()
    pool.close()


def test_the_launchers_event_loop_does_not_wait_for_vllms_import() -> None:
    code = "import proxy.api_server, sys; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
