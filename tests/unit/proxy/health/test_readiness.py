"""Ready is what a real generation has shown a short while ago; many who ask make one."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from proxy.health import readiness as module
from proxy.health.probes import probe_routes
from proxy.health.readiness import Readiness


class Cluster:
    """A cluster that a probe goes through, or does not."""

    def __init__(self, last_ago_s: float | None = None) -> None:
        self.last_s = None if last_ago_s is None else time.monotonic() - last_ago_s
        self.probes = 0
        self.obstacle = ""
        self.takes: Callable[[], Any] = self.hand_over
        self.readiness = Readiness(30.0, lambda: self.last_s, self.probe, lambda: self.obstacle)

    async def probe(self) -> None:
        self.probes += 1
        await asyncio.sleep(0.01)
        self.takes()

    def hand_over(self) -> None:
        self.last_s = time.monotonic()

    def fail(self) -> None:
        raise ValueError("Worker decode-0 left")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "REPORT_POLL_S", 0.01)


async def test_traffic_of_clients_makes_it_ready_without_a_probe() -> None:
    cluster = Cluster(last_ago_s=29.0)
    assert await cluster.readiness.reason() == ""
    assert cluster.probes == 0


@pytest.mark.parametrize("last_ago_s", [None, 31.0])
async def test_without_recent_traffic_many_who_ask_make_one_request(last_ago_s: float | None) -> None:
    cluster = Cluster(last_ago_s)
    assert await asyncio.gather(*(cluster.readiness.reason() for _ in range(20))) == [""] * 20
    assert cluster.probes == 1
    assert await cluster.readiness.reason() == ""
    assert cluster.probes == 1


async def test_who_leaves_does_not_take_the_probe_along() -> None:
    cluster = Cluster()
    impatient = asyncio.create_task(cluster.readiness.reason())
    patient = asyncio.create_task(cluster.readiness.reason())
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient == ""


async def test_a_probe_that_fails_is_the_reason_and_the_next_one_may_succeed() -> None:
    cluster = Cluster()
    cluster.takes = cluster.fail
    assert await cluster.readiness.reason() == "a test request failed: Worker decode-0 left"
    cluster.takes = cluster.hand_over
    assert await cluster.readiness.reason() == ""


async def test_an_answer_of_one_worker_alone_is_not_enough() -> None:
    cluster = Cluster()
    cluster.takes = lambda: None
    assert "did not go through a prefill and a decode worker" in await cluster.readiness.reason()


async def test_the_report_of_the_hand_over_may_come_after_the_answer() -> None:
    cluster = Cluster()
    cluster.takes = lambda: asyncio.get_running_loop().call_later(0.02, cluster.hand_over)
    assert await cluster.readiness.reason() == ""


async def test_a_probe_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", 0.02)
    hangs = Readiness(30.0, lambda: None, lambda: asyncio.sleep(60), lambda: "")
    assert await hangs.reason() == "a test request got no answer within 0.02 s"


async def test_an_obstacle_is_told_without_a_probe() -> None:
    cluster = Cluster(last_ago_s=1.0)
    cluster.obstacle = "no prefill worker takes requests"
    assert await cluster.readiness.reason() == cluster.obstacle
    assert cluster.probes == 0


async def ask(path: str, cluster: Cluster, faults: list[str]) -> tuple[int, Any]:
    vllms = Route(path, lambda _: PlainTextResponse("vLLM's own"), methods=["GET"])
    app = Starlette(routes=[*probe_routes(lambda: faults, cluster.readiness), vllms])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://cluster") as client:
        response = await client.get(path)
        return response.status_code, response.json()


async def test_the_routes_answer_with_a_status_and_the_reasons() -> None:
    cluster = Cluster(last_ago_s=1.0)
    assert await ask("/health", cluster, []) == (200, {"status": "healthy"})
    assert await ask("/ping", cluster, []) == (200, {"status": "healthy"})
    assert await ask("/ready", cluster, []) == (200, {"status": "ready"})
    assert await ask("/health", cluster, ["stuck"]) == (503, {"status": "not healthy", "reasons": ["stuck"]})
    assert await ask("/ready", cluster, ["stuck"]) == (503, {"status": "not ready", "reasons": ["stuck"]})
    cluster.obstacle = "nobody is there"
    assert await ask("/health", cluster, []) == (200, {"status": "healthy"})
    assert await ask("/ready", cluster, []) == (503, {"status": "not ready", "reasons": ["nobody is there"]})
