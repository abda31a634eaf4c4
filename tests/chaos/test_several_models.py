"""Two models on demand with room for one: real clusters of workers without engines, from first request to Ctrl-C."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.launches import twinpool
from lab.server_process import Server, free_port, wait_for_no_process
from tests.engine.observed import wait_until

pytestmark = pytest.mark.timeout(400)

RESIDENCY_S = 4.0
WAIT_S = 150.0
KEY, ADMIN_KEY = "sesame", "open"
REASONS = (404, 429, 503)
"""With which a request may be refused; each reply says why."""


class Client:
    """Asks, and keeps what came of it."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        self._http = httpx.AsyncClient(base_url=url, timeout=2 * WAIT_S, headers=headers)
        self.answered: dict[str, list[float]] = {"alpha": [], "beta": []}
        """When, by model."""
        self.refused: list[tuple[int, str]] = []

    async def ask(self, model: str, max_tokens: int = 5) -> bool:
        body = {"model": model, "prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code == 200:
            assert answer.json()["model"] == model
            assert answer.json()["usage"]["completion_tokens"] == max_tokens
            self.answered[model].append(time.monotonic())
            return True
        assert answer.status_code in REASONS, answer.text
        self.refused.append((answer.status_code, answer.json()["error"]["message"]))
        return False

    async def stream(self, model: str, max_tokens: int) -> str:
        body = {"model": model, "prompt": "one", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            return "".join([part async for part in answer.aiter_text()])

    async def models(self) -> dict[str, dict[str, Any]]:
        answer = await self._http.get("/admin/models", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        return {model["name"]: model for model in answer.json()["models"]}

    async def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(await self.models()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)

    async def remove(self, model: str) -> int:
        answer = await self._http.delete(f"/admin/models/{model}", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        return answer.status_code

    async def close(self) -> None:
        await self._http.aclose()


def test_two_models_share_a_place_without_thrashing_and_removing_one_fails_no_request(
    model_path: str, log_dir: Path
) -> None:
    cluster = {"model": model_path, "engine": "simulated", "simulation": {"eos_every": 0}}
    model = {"cluster": cluster, "policy": "on_demand", "min_residency_s": RESIDENCY_S, "start_wait_s": WAIT_S}
    config: dict[str, Any] = {
        "models": {"alpha": model, "beta": model},
        "capacity": 1,
        "server": {"port": free_port(), "api_key": KEY, "admin_key": ADMIN_KEY},
    }
    server = Server(twinpool("several-models", config, log_dir), log_dir)
    try:
        server.wait_until_healthy()
        asyncio.run(_use(server.url))
        server.interrupt()
        assert server.process.wait(30) == 130
        assert wait_for_no_process(server.mark, 5.0) == {}
    finally:
        server.stop()


async def _use(url: str) -> None:
    client = Client(url)
    assert await client.ask("alpha")
    came_up_s = time.monotonic()

    async def insist(model: str, until: asyncio.Event) -> None:
        while not until.is_set():
            await client.ask(model)
            await asyncio.sleep(0.2)

    # Both are asked for, in turn; the place changes hands once, when alpha has had it for its residency.
    enough = asyncio.Event()
    alphas = asyncio.create_task(insist("alpha", enough))
    assert await client.ask("beta")
    swapped_s = time.monotonic()
    models = await client.models()
    assert (models["alpha"]["starts"], models["beta"]["starts"]) == (1, 1)
    assert max(client.answered["alpha"]) - came_up_s > RESIDENCY_S / 2  # it served while beta waited
    assert swapped_s - came_up_s > RESIDENCY_S
    # beta is busy for longer than its residency, and alpha is still asked for: the busy one stays.
    streams = [asyncio.create_task(client.stream("beta", 400)) for _ in range(4)]
    await client.until(lambda now: now["beta"]["running"] == len(streams))
    await asyncio.sleep(RESIDENCY_S)
    models = await client.models()
    assert (models["beta"]["state"], models["beta"]["running"]) == ("up", len(streams))
    assert models["alpha"]["waiting"] == 1
    # It is removed under load: it takes no more, finishes what it has, leaves the map, and then alpha has the place.
    assert await client.remove("beta") == 202
    assert not await client.ask("beta")
    assert "removed" in client.refused[-1][1]
    for text in await asyncio.gather(*streams):
        assert text.count('"text"') >= 400
        assert text.endswith("data: [DONE]\n\n")
        assert "error" not in text
    await client.until(lambda now: "beta" not in now and now["alpha"]["state"] == "starting")
    enough.set()
    await alphas  # it waited, and is answered by the second start
    assert (await client.models())["alpha"]["starts"] == 2
    assert len(client.refused) == 1
    await client.close()


def test_a_front_that_is_killed_takes_its_clusters_with_it(model_path: str, log_dir: Path) -> None:
    cluster = {"model": model_path, "engine": "simulated"}
    config = {"models": {"alpha": {"cluster": cluster}}, "server": {"port": free_port()}}
    server = Server(twinpool("killed-front", config, log_dir), log_dir)
    try:
        server.wait_until_healthy()  # the front is; the model has only begun to start

        def clusters() -> list[str]:
            return [line for line in server.processes().values() if "cluster.cli serve" in line]

        wait_until("the model's cluster has been started", lambda: len(clusters()) == 1, 30)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        assert wait_for_no_process(server.mark, 20.0) == {}
    finally:
        server.stop()
