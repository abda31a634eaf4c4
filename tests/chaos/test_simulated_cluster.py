"""The real API server, dispatcher and launcher in front of 64 workers without engines, of which a process is killed."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.simulated.engine.vocabulary import Vocabulary, word_tokens
from lab.launches import twinpool
from lab.server_process import Server, free_port, wait_for_no_process
from tests.engine.observed import counters, status, wait_until

pytestmark = pytest.mark.timeout(120)

PER_POOL = 32


async def _ask(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


def test_64_workers_serve_and_those_of_a_killed_process_come_back(model_path: str, log_dir: Path) -> None:
    config: dict[str, Any] = {
        "model": model_path,
        "engine": "simulated",
        "simulation": {"time_scale": 5},
        "pools": {"prefill": {"replicas": PER_POOL}, "decode": {"replicas": PER_POOL}},
        "server": {"port": free_port()},
    }
    server = Server(twinpool("cluster-simulated", config, log_dir), log_dir)
    try:
        server.wait_until_healthy()
        told = status(server.url)
        assert [worker.state for worker in told.workers] == ["ready"] * 2 * PER_POOL
        assert all(worker.simulated for worker in told.workers)
        assert told.model == f"{model_path}-simulated"
        vocabulary = Vocabulary(word_tokens(Path(model_path)), 0)
        prompts = [[100 + index, *range(100, 300)] for index in range(PER_POOL)]

        async def ask_all() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                return list(await asyncio.gather(*(_ask(client, told.model, prompt, 20) for prompt in prompts)))

        expected = [vocabulary.continuation(prompt, 20) for prompt in prompts]
        assert asyncio.run(ask_all()) == expected
        seen = counters(server.url)
        assert seen['twinpool_handovers_total{outcome="loaded"}'] >= PER_POOL
        assert seen["twinpool_workers_simulated"] == 2 * PER_POOL
        victim = next(worker for worker in told.workers if worker.worker_id == f"decode-{PER_POOL - 1}")
        os.kill(victim.pid, signal.SIGKILL)
        wait_until("the killed workers are back", lambda: _came_back(server, victim.pid), 15)
        assert asyncio.run(ask_all()) == expected
    finally:
        server.stop()
    assert wait_for_no_process(server.mark, 2.0) == {}


def _came_back(server: Server, old_pid: int) -> bool:
    return all(worker.state == "ready" and worker.pid != old_pid for worker in status(server.url).workers)
