"""Who needs the API key for what."""

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI, WebSocket
from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from cluster.terminal.demo import _trusting
from proxy.middleware.key_guard import ask_for_key

PATHS = ("/twinpool/status", "/metrics", "/v1/models", "/tokenize", "/docs", "/openapi.json", "/version", "/nothing")


def guarded() -> tuple[FastAPI, list[int]]:
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"])  # as vLLM does
    app.mount("/metrics", make_asgi_app(CollectorRegistry()))
    refused: list[int] = []

    @app.get("/{path:path}")
    async def answer(path: str) -> dict[str, str]:
        return {"path": path}

    @app.websocket("/v1/realtime")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    def may(headers: Headers) -> bool:
        return headers.get("authorization") == "Bearer sesame"

    ask_for_key(app, may, lambda: refused.append(1))
    return app, refused


def client(app: Any, key: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://cluster", headers=headers)


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_without_the_key_nothing_is_told_and_it_is_counted(key: str) -> None:
    app, refused = guarded()
    async with client(app, key) as stranger:
        for number, path in enumerate(PATHS, start=1):
            answer = await stranger.get(path)
            assert answer.status_code == 401
            assert len(refused) == number
        assert answer.json()["error"]["message"] == "the API key is missing or wrong"
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_with_the_key_everything_is_served() -> None:
    app, refused = guarded()
    async with client(app, "sesame") as friend:
        for path in PATHS:
            assert (await friend.get(path)).status_code == 200
    assert not refused


async def test_probes_and_preflights_need_no_key() -> None:
    app, refused = guarded()
    async with client(app) as anybody:
        for path in ("/health", "/ready", "/ping"):
            assert (await anybody.get(path)).status_code == 200
        asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        assert (await anybody.options("/v1/models", headers=asked)).text == "OK"
    assert not refused


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://page"}, {"Access-Control-Request-Method": "GET"}])
async def test_metrics_are_not_told_to_who_asks_with_another_method(headers: dict[str, str]) -> None:
    app, refused = guarded()
    async with client(app) as stranger:
        assert (await stranger.options("/metrics/", headers=headers)).status_code == 401
        assert (await stranger.head("/metrics/")).status_code == 401
    assert len(refused) == 2


async def test_a_preflight_for_the_metrics_tells_nothing_of_them() -> None:
    app, _ = guarded()
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "GET"}
    async with client(app) as anybody:
        assert (await anybody.options("/metrics/", headers=asked)).text == "OK"


async def test_an_api_path_says_what_vllm_says() -> None:
    app, _ = guarded()
    async with client(app) as stranger:
        assert (await stranger.get("/v1/models")).content == b'{"error":"Unauthorized"}'


def test_a_websocket_without_the_key_is_not_accepted() -> None:
    app, refused = guarded()
    with TestClient(app) as browser, pytest.raises(WebSocketDisconnect), browser.websocket_connect("/v1/realtime"):
        pass
    assert len(refused) == 1


async def test_the_body_of_a_stranger_is_not_read() -> None:
    app, _ = guarded()
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
    assert sent[0]["status"] == 401


async def test_the_demonstration_trusts_the_servers_own_certificate(tmp_path: Path) -> None:
    certificate, key = tmp_path / "crt", tmp_path / "key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=cluster.example"
    made = await asyncio.create_subprocess_exec(
        *command.split(), "-keyout", key, "-out", certificate, stderr=subprocess.DEVNULL
    )
    assert await made.wait() == 0

    async def here(_request: web.Request) -> web.Response:
        return web.Response(text="here")

    application = web.Application()
    application.router.add_get("/", here)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=_server_side(certificate, key))
    await site.start()
    address = runner.addresses[0]
    connector = aiohttp.TCPConnector(ssl=_trusting(str(certificate)))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"https://127.0.0.1:{address[1]}/") as answer,
    ):
        assert await answer.text() == "here"
    await runner.cleanup()


def _server_side(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
