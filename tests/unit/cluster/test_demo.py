import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from cluster.status import ClusterStatus, LastRequest
from cluster.terminal import demo
from cluster.terminal.demo import DemoError, describe, invitation, run_demo

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler, list[LastRequest | None]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server with this chat handler; its status reports go through the list, the last one stays."""
    runners = []

    async def start(chat: Handler, reports: list[LastRequest | None]) -> str:
        async def status(_request: web.Request) -> web.Response:
            last = reports.pop(0) if len(reports) > 1 else reports[0]
            return web.Response(body=msgspec.json.encode(ClusterStatus("m", last_request=last)))

        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_get("/twinpool/status", status)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


def stream(*events: object) -> Handler:
    async def chat(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer sesame"
        assert (await request.json())["stream"] is True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        return response

    return chat


def piece(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


async def shown(url: str) -> str:
    text = io.StringIO()
    await run_demo(url, "m", "sesame", Console(file=text, width=200))
    return text.getvalue()


async def test_the_text_is_shown_and_then_what_moved(serve: Serve) -> None:
    finished = LastRequest(400, 0.5, 0.0032, 9_200_000, "host", "loaded")
    chat = stream({"choices": [{"delta": {"role": "assistant"}}]}, piece("Because [x] "), piece("so."), "[DONE]")
    text = await shown(await serve(chat, [LastRequest(400), finished]))
    assert "Because [x] so." in text
    assert "TTFT" in text
    assert "hand-off 3.2 ms" in text
    assert "moved 9.2 MB" in text
    assert "link host" in text


async def test_a_request_that_stayed_on_the_decode_worker_is_said_to_have(serve: Serve) -> None:
    assert "by the decode worker alone" in await shown(await serve(stream(piece("x"), "[DONE]"), [None]))


async def test_a_hand_over_that_is_never_reported_does_not_hold_up_the_start(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_STATUS_WAIT_S", 0.1)
    assert "TTFT" in await shown(await serve(stream(piece("x")), [LastRequest(400)]))


async def test_an_error_status_is_told(serve: Serve) -> None:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "worker prefill-0 died"}}, status=503)

    with pytest.raises(DemoError, match=r"503.*worker prefill-0 died"):
        await shown(await serve(refuse, [None]))


async def test_an_error_event_is_told(serve: Serve) -> None:
    with pytest.raises(DemoError, match="decode-0 died"):
        await shown(await serve(stream(piece("x"), {"error": {"message": "decode-0 died"}}), [None]))


async def test_nobody_listening_is_told(free_port: int) -> None:
    with pytest.raises(DemoError, match="no answer from"):
        await shown(f"http://127.0.0.1:{free_port}")


def test_numbers_that_are_not_known_are_left_out() -> None:
    assert describe(None, LastRequest(10)) == "no text came · prompt 10 tokens"


def test_the_invitation_can_be_copied_into_a_shell() -> None:
    text = invitation("http://h:1", "m", "")
    assert "curl http://h:1/v1/chat/completions" in text
    body = text.split("-d '")[1].split("'")[0]
    assert json.loads(body)["model"] == "m"
    code = text.split("python -c '")[1].split("'\n")[0]
    compile(code, "invitation", "exec")
    with_key = invitation("http://h:1", "m", "sesame")
    assert "sesame" not in with_key
    assert "$API_KEY" in with_key
