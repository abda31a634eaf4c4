"""What a client sends reaches the model, and what the model answers reaches the client, also when one of them ends."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from proxy.middleware import request_body
from tests.unit.proxy.models.front_server import asks, echo, front, until

ONE = {"alpha": {}}
TWO = {"alpha": {}, "beta": {}}
STREAM = "text/event-stream; charset=utf-8"


async def sse(request: web.Request, content_type: str = STREAM) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    return response


def abort(request: web.Request) -> None:
    """What a client sees of a process that is killed."""
    assert request.transport is not None
    request.transport.abort()


async def test_a_request_reaches_its_model_as_it_was_sent(tmp_path: Path) -> None:
    body = b'{ "messages": [],\n  "model":"beta", "text": "\xc3\xa4" }'
    headers = {"Content-Type": "application/json", "X-Request-Id": "r-1", "X-Slo-Class": "chat", "Accept": "*/*"}
    async with (
        front(tmp_path, echo, models=TWO) as running,
        running.http.post(URL("/v1/chat/completions?a=1&b=%2F", encoded=True), data=body, headers=headers) as response,
    ):
        told = await response.json()
    assert (told["model"], told["method"]) == ("beta", "POST")
    assert told["path"] == "/v1/chat/completions?a=1&b=%2F"
    assert told["body"].encode("latin-1") == body
    came = dict(told["headers"])
    assert {name.lower(): value for name, value in headers.items()}.items() <= came.items()
    assert came["content-length"] == str(len(body))
    assert "user-agent" in came


async def test_headers_that_are_not_ascii_stay_as_they_are(tmp_path: Path) -> None:
    async with (
        front(tmp_path, echo, models=ONE) as running,
        running.http.post("/v1/completions", headers={"X-Request-Id": "größe"}) as response,
    ):
        assert ["x-request-id", "größe"] in (await response.json())["headers"]


async def test_the_reply_is_the_models_own(tmp_path: Path) -> None:
    async def busy(_request: web.Request) -> web.StreamResponse:
        headers = {"Retry-After": "17", "X-Request-Id": "r-2", "Content-Type": "application/json"}
        return web.Response(status=429, reason="Too many", headers=headers, body=b'{"error": {"code": 429}}')

    async with (
        front(tmp_path, busy, models=ONE) as running,
        running.http.post("/v1/completions", **asks("alpha")) as response,
    ):
        assert response.status == 429
        assert (response.headers["Retry-After"], response.headers["X-Request-Id"]) == ("17", "r-2")
        assert await response.read() == b'{"error": {"code": 429}}'
        assert len(response.headers.getall("Date")) == 1
        await running.until_metric('requests_total{model="alpha",status="429"}', 1)


async def test_events_reach_the_client_one_by_one(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(b"data: 1\n\n")
        await seen.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with (
        front(tmp_path, stream, models=ONE) as running,
        running.http.post("/v1/completions", **asks("alpha")) as response,
    ):
        assert response.headers["Content-Type"] == STREAM
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        seen.set()
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_a_client_that_leaves_ends_its_request_at_the_model(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        try:
            response = await sse(request)
            await response.write(b"data: 1\n\n")
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    async with front(tmp_path, stream, models=ONE) as running:
        async with running.http.post("/v1/completions", **asks("alpha")) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await asyncio.wait_for(ended.wait(), 30)
        await running.until_metric('requests_abandoned_total{model="alpha"}', 1)
        assert await running.running("alpha") == 0


@pytest.mark.parametrize("sent", [b"data: 1\n\n", b'data: 1\n\ndata: {"cho', b""])
async def test_a_stream_whose_model_dies_ends_with_an_error_event(tmp_path: Path, sent: bytes) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        if sent:
            await response.write(sent)
        await asyncio.sleep(0.1)  # what was written is on its way before the connection is reset
        abort(request)
        return response

    async with (
        front(tmp_path, die, models=ONE) as running,
        running.http.post("/v1/completions", **asks("alpha")) as response,
    ):
        events = (await response.read()).split(b"\n\n")
        await running.until_metric('requests_broken_total{model="alpha"}', 1)
    assert events[-1] == b""
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (502, "Bad Gateway")
    assert b"[DONE]" not in b"".join(events)


async def test_the_error_event_of_an_api_with_named_events_has_its_name(tmp_path: Path) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        abort(request)
        return response

    async with (
        front(tmp_path, die, models=ONE) as running,
        running.http.post("/v1/responses", **asks("alpha")) as response,
    ):
        assert (await response.read()).startswith(b"event: error\ndata: {")


async def test_any_other_reply_that_breaks_off_is_seen_to_be_incomplete(tmp_path: Path) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        response = await sse(request, "application/json")
        await response.write(b'{"choices": [')
        await asyncio.sleep(0.1)
        abort(request)
        return response

    async with (
        front(tmp_path, die, models=ONE) as running,
        running.http.post("/v1/completions", **asks("alpha")) as response,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_model_that_dies_before_it_answers_is_a_502(tmp_path: Path) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        abort(request)
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        front(tmp_path, die, models=ONE) as running,
        running.http.post("/v1/completions", **asks("alpha")) as response,
    ):
        assert response.status == 502
        assert (await response.json())["error"]["code"] == 502


async def test_a_model_that_does_not_listen_is_a_503_that_says_when(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models=ONE) as running:
        await (await running.http.post("/v1/completions", **asks("alpha"))).read()
        child = running.models.find("alpha")
        assert child is not None
        await child.session.close()  # as it is when its process has just ended
        async with running.http.post("/v1/completions", **asks("alpha")) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        child.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "nobody.sock")))
        async with running.http.post("/v1/completions", **asks("alpha")) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        await running.until_metric('requests_broken_total{model="alpha"}', 2)


async def test_a_large_body_passes_and_a_larger_one_is_refused_unread(tmp_path: Path) -> None:
    async with front(tmp_path, echo, models=ONE, max_body_bytes=1 << 20) as running:
        text = "x" * ((1 << 20) - 100)
        async with running.http.post("/v1/completions", **asks("alpha", prompt=text)) as response:
            assert text in (await response.json())["body"]

        async def pieces() -> Any:
            for _ in range(20):
                yield b"x" * (1 << 16)

        for data in (io.BytesIO(b"x" * (1 << 21)), pieces()):
            async with running.http.post("/v1/completions", data=data) as response:
                assert response.status == 413
        await running.until_metric('requests_rejected_total{model="",reason="body_too_large"}', 2)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/admin/models"])
async def test_a_body_that_stops_coming_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(request_body, "BODY_PIECE_WITHIN_S", 0.1)
    async with front(tmp_path, echo, models=ONE) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_leaves_while_its_model_starts_does_not_wait_any_more(tmp_path: Path) -> None:
    on_demand = {"alpha": {"policy": "on_demand"}}
    async with front(tmp_path, echo, models=on_demand, held=("alpha",)) as running:
        asking = asyncio.create_task(running.http.post("/v1/completions", **asks("alpha")))

        async def waits() -> bool:
            return await running.waiting("alpha") == 1

        async def nobody_waits() -> bool:
            return await running.waiting("alpha") == 0

        await until(waits)
        asking.cancel()
        await until(nobody_waits)
        await running.models.finish_start("alpha")
