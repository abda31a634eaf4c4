"""The front as a client and as an operator see it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from proxy.models import residency
from tests.unit.proxy.models.front_server import MODEL, Running, asks, echo, front, until

ON_DEMAND = {"policy": "on_demand", "min_residency_s": 0}
TWO_ON_DEMAND = {"alpha": ON_DEMAND, "beta": ON_DEMAND}
TWO = {"alpha": {}, "beta": {}}


async def ask(running: Running, model: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any]:
    async with running.http.post(path, **asks(model, **fields)) as response:
        return response.status, await response.json()


async def test_the_first_request_starts_a_model_and_is_answered_by_it(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models=TWO_ON_DEMAND) as running:
        assert running.models.started == []
        status, told = await ask(running, "beta")
        assert (status, told["model"]) == (200, "beta")
        assert running.models.started == ["beta"]


async def test_with_room_for_one_the_other_makes_room(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models=TWO_ON_DEMAND, capacity=1) as running:
        for name in ("alpha", "beta", "alpha"):
            assert (await ask(running, name))[1]["model"] == name
        assert running.models.started == ["alpha", "beta", "alpha"]
        assert running.models.stopped == ["alpha", "beta"]
        await running.until_metric('stops_total{model="alpha",reason="evicted"}', 1)


async def test_a_busy_model_keeps_its_place_and_the_other_client_is_told(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"model": request.app[MODEL]})

    impatient = {**ON_DEMAND, "start_wait_s": 0.2}
    models = {"alpha": ON_DEMAND, "beta": impatient}
    async with front(tmp_path, slow, models=models, capacity=1) as running:
        busy = asyncio.create_task(ask(running, "alpha"))

        async def is_busy() -> bool:
            return await running.running("alpha") == 1

        await until(is_busy)
        async with running.http.post("/v1/completions", **asks("beta")) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert "in use" in (await response.json())["error"]["message"]
        await running.until_metric('requests_rejected_total{model="beta",reason="no_room"}', 1)
        release.set()
        assert await busy == (200, {"model": "alpha"})
        assert running.models.stopped == []


async def test_a_model_that_crashes_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "BACKOFF_S", (0.3,))
    async with front(tmp_path, echo, models={"alpha": {}}) as running:
        assert (await ask(running, "alpha"))[0] == 200
        await running.models.crash("alpha", "out of memory")
        async with running.http.get("/ready") as response:
            assert response.status == 503
            assert "alpha" in await response.text()
        status, answer = await ask(running, "alpha")
        assert status == 503
        assert "out of memory" in answer["error"]["message"]
        await asyncio.wait_for(running.keeper.until_pinned_are_up(), 30)
        assert (await ask(running, "alpha"))[0] == 200


async def test_ready_means_that_every_pinned_model_is_up(tmp_path: Path) -> None:
    models = {"alpha": {}, "beta": ON_DEMAND}
    async with front(tmp_path, echo, models=models, held=("alpha",)) as running:
        for path, status in (("/health", 200), ("/ready", 503)):
            async with running.http.get(path) as response:
                assert response.status == status
        await running.models.finish_start("alpha")
        async with running.http.get("/ready") as response:
            assert response.status == 200


async def test_the_list_has_every_model_and_starts_none(tmp_path: Path) -> None:
    models = {"alpha": {}, "org/beta": ON_DEMAND}
    async with front(tmp_path, echo, models=models) as running:
        await running.keeper.until_pinned_are_up()
        async with running.http.get("/v1/models") as response:
            cards = (await response.json())["data"]
        assert [(card["id"], card.get("max_model_len")) for card in cards] == [("alpha", 7), ("org/beta", None)]
        for name, status in (("alpha", 200), ("org/beta", 200), ("gamma", 404)):
            async with running.http.get(f"/v1/models/{name}") as response:
                assert response.status == status
        assert running.models.started == ["alpha"]


async def test_looking_at_a_model_neither_starts_nor_keeps_it(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models=TWO_ON_DEMAND) as running:
        async with running.http.get("/models/alpha/metrics") as response:
            assert response.status == 503
            assert "not up" in (await response.json())["error"]["message"]
        assert running.models.started == []
        await ask(running, "alpha")
        async with running.http.get("/models/alpha/metrics?x=1") as response:
            assert (await response.json())["path"] == "/metrics?x=1"


async def test_further_names_of_a_model_lead_to_it(tmp_path: Path) -> None:
    cluster = {"slo": {"classes": {"batch": {"models": ["alpha-batch"]}}}}
    served = ["alpha"]

    async def serve(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in served]})
        return web.json_response({"model": request.app[MODEL]})

    async with front(tmp_path, serve, models={"alpha": {"cluster": cluster}, "beta": ON_DEMAND}) as running:
        assert await ask(running, "alpha-batch") == (200, {"model": "alpha"})
        served.append("alpha-adapter")  # loaded while it was up
        assert await ask(running, "alpha-adapter") == (200, {"model": "alpha"})


async def test_without_a_key_there_is_nothing(tmp_path: Path) -> None:
    keys = {"keys": ("sesame", "open"), "admin_keys": ("master",)}
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}, **keys) as running:  # type: ignore[arg-type]
        for path in ("/v1/completions", "/tokenize", "/models/alpha/v1/completions", "/admin/models", "/metrics"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
                async with running.http.post(path, data=b"{}", headers=headers) as response:
                    assert response.status == 401
        assert running.models.started == []
        async with running.http.get("/metrics") as response:
            assert response.status == 401
        async with running.http.get("/metrics", headers={"Authorization": "Bearer open"}) as response:
            assert 'requests_rejected_total{model="",reason="unauthorized"} 16.0' in await response.text()
        for key, path, status in (
            *(("open", "/v1/models", 200), ("master", "/v1/models", 200)),
            *(("open", "/admin/models", 401), ("master", "/admin/models", 200)),
        ):
            async with running.http.get(path, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == status, (key, path)
        for path in ("/twinpool/restart", "/models/alpha/twinpool/restart", "/models/alpha/admin/scale"):
            for key, status in (("open", 401), ("master", 503)):  # 503: the model is not up
                async with running.http.post(path, headers={"Authorization": f"Bearer {key}"}) as response:
                    assert response.status == status, (key, path)
        for path in ("/v1/load_lora_adapter", "/models/alpha/v1/%6coad_lora_adapter", "/v1/unload_lora_adapter"):
            async with running.http.post(URL(path, encoded=True), headers={"Authorization": "Bearer open"}) as response:
                assert response.status == 401, path


async def test_a_web_page_gives_no_orders_without_a_key(tmp_path: Path) -> None:
    page = {"Origin": "http://elsewhere.example", "Content-Type": "text/plain"}
    with_key = {**page, "Authorization": "Bearer master"}
    order = '{"name": "beta"}'
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}) as running:
        for path in ("/admin/models", "/models/alpha/twinpool/restart"):
            async with running.http.post(path, data=order, headers=page) as response:
                assert response.status == 403
        async with running.http.post("/v1/completions", data='{"model": "alpha"}', headers={**page}) as response:
            assert response.status == 200
        assert running.models.started == ["alpha"]
    async with (
        front(tmp_path, echo, models={}, keys=("master",)) as running,
        running.http.post("/admin/models", data=order, headers=with_key) as response,
    ):
        assert response.status == 201


async def test_a_model_can_be_added_and_removed(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models={"alpha": ON_DEMAND}) as running:
        async with running.http.post("/admin/models", json={"name": "beta", "cluster": {"model": "/m"}}) as response:
            assert (response.status, (await response.json())["policy"]) == (201, "pinned")
        assert (await ask(running, "beta"))[1]["model"] == "beta"
        async with running.http.delete("/admin/models/beta") as response:
            assert response.status == 202

        async def gone() -> bool:
            return [model.name for model in running.keeper.status().models] == ["alpha"]

        await until(gone)
        assert (await ask(running, "beta"))[0] == 404
        assert running.models.stopped == ["beta"]


async def test_removing_a_model_under_load_fails_no_request(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def stream(_request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(_request)
        await response.write(b"data: 1\n\n")
        await release.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def read(running: Running) -> bytes:
        async with running.http.post("/v1/completions", **asks("alpha")) as response:
            return await response.read()

    async with front(tmp_path, stream, models=TWO) as running:
        reading = [asyncio.create_task(read(running)) for _ in range(5)]

        async def all_run() -> bool:
            return await running.running("alpha") == 5

        await until(all_run)
        async with running.http.delete("/admin/models/alpha") as response:
            assert response.status == 202
        assert (await ask(running, "alpha"))[0] == 404
        assert running.models.stopped == []
        assert {model.name: model.state for model in running.keeper.status().models}["alpha"] == "draining"
        release.set()
        assert await asyncio.gather(*reading) == [b"data: 1\n\ndata: [DONE]\n\n"] * 5

        async def stopped() -> bool:
            return running.models.stopped == ["alpha"]

        await until(stopped)


async def test_what_cannot_be_added_or_removed_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models={"alpha": {"cost": 2}}, capacity=3) as running:
        for body, status, text in (
            ({"name": "alpha"}, 409, "there already"),
            ({"cluster": {}}, 400, "name is missing"),
            ({"name": "../x"}, 400, "models"),
            ({"name": "b", "policy": "sometimes"}, 400, "models.b.policy"),
            ({"name": "b", "cluster": {"pool": {}}}, 400, "models.b.cluster.pool"),
            ({"name": "b", "cluster": {"engine": {"no_such_option": 1}}}, 400, "no_such_option"),
            ({"name": "b", "cluster": {"server": {"port": 1}}}, 400, "server.port"),
            ({"name": "b", "config": "/etc/passwd"}, 400, "config names a file"),
            ({"name": "b", "cost": 2}, 400, "capacity"),
            ({"name": "b", "env": {"A=B": "1"}}, 400, "models.b.env"),
            ({"name": "b", "env": {"A": "1\0"}}, 400, "models.b.env"),
        ):
            async with running.http.post("/admin/models", json=body) as response:
                assert response.status == status, body
                assert text in (await response.json())["error"]["message"], body
        async with running.http.post("/admin/models", data=b'{"x": ' + b"[" * 100_000) as response:
            assert response.status == 400
        for path, status in (
            *(("beta", 404), ("alpha?timeout_s=soon", 400)),
            *(("alpha?timeout_s=nan", 400), ("alpha?timeout_s=inf", 400)),
        ):
            async with running.http.delete(f"/admin/models/{path}") as response:
                assert response.status == status
        assert running.models.stopped == []


SLEEPS = {**ON_DEMAND, "sleep": True}


async def test_models_that_may_sleep_are_woken_and_not_started_again(tmp_path: Path) -> None:
    models = {"alpha": SLEEPS, "beta": SLEEPS}
    async with front(tmp_path, echo, models=models, capacity=1, max_asleep=2) as running:
        for name in ("alpha", "beta", "alpha", "beta"):
            assert (await ask(running, name))[1]["model"] == name
        assert running.models.started == ["alpha", "beta"]
        assert running.models.stopped == []
        assert running.models.turned[-2:] == [("sleep", "alpha"), ("wake", "beta")]
        states = {model.name: (model.state, model.wakes) for model in running.keeper.status().models}
        assert states == {"alpha": ("asleep", 1), "beta": ("up", 1)}
        await running.until_metric('wakes_total{model="alpha"}', 1)
        async with running.http.get("/models/alpha/health") as response:
            assert (await response.json())["path"] == "/health", "looking does not wake it"
        async with running.http.post("/models/alpha/twinpool/wake") as response:
            assert response.status == 409
        assert len(running.models.turned) == 5


async def test_a_model_that_does_not_wake_is_started_for_the_request_that_waits(tmp_path: Path) -> None:
    models = {"alpha": SLEEPS, "beta": SLEEPS}
    async with front(tmp_path, echo, models=models, capacity=1, max_asleep=2) as running:
        await ask(running, "alpha")
        await ask(running, "beta")
        running.models.sleepless.add("alpha")
        assert (await ask(running, "alpha"))[1]["model"] == "alpha"
        assert (running.models.started, running.models.stopped) == (["alpha", "beta", "alpha"], ["alpha"])
        await running.until_metric('stops_total{model="alpha",reason="stuck"}', 1)
