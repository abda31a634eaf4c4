"""Which requests concern the cluster, and what becomes of them."""

import json
from typing import Any

import pytest

from proxy.api_servers import control as module
from proxy.api_servers import messages
from proxy.api_servers.control import ControlDesk, ControlForward, is_control


@pytest.mark.parametrize("path", ["/twinpool/status", "/twinpool/drain", "/health", "/ready", "/ping"])
def test_what_concerns_the_cluster_is_passed_on(path: str) -> None:
    assert is_control(path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics", "/tokenize", "/healthy", "/twinpool"])
def test_what_a_process_can_answer_itself_is_not(path: str) -> None:
    assert not is_control(path)


async def forward(reply: messages.ControlReply | None, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    sent: list[Any] = []

    async def ask(*_args: Any) -> messages.ControlReply | None:
        return reply

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("it was not passed on")

    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}
    await ControlForward(app, ask)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_no_answer_is_a_503() -> None:
    status, body = await forward(None)
    assert (status, body["error"]["code"]) == (503, 503)
    assert "did not answer" in body["error"]["message"]


async def test_a_body_without_end_is_refused() -> None:
    status, body = await forward(None, b"x" * (module.MAX_BODY_BYTES + 1))
    assert (status, body["error"]["type"]) == (413, "Request Entity Too Large")


@pytest.mark.parametrize("pieces", [[], [b'{"work']])
async def test_an_order_whose_client_leaves_before_its_end_is_not_passed_on(pieces: list[bytes]) -> None:
    """Of an order that has defaults, a part would be another order."""
    coming: list[Any] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    coming.append({"type": "http.disconnect"})

    async def nobody(*_args: Any) -> Any:
        raise AssertionError("it was carried out")

    async def receive() -> Any:
        return coming.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/twinpool/restart", "query_string": b"", "headers": []}
    await ControlForward(nobody, nobody)(scope, receive, nobody)


async def answer(app: Any, target: str = "/health") -> messages.ControlReply:
    headers = [(b"Authorization", b"Bearer k"), (b"Content-Length", b"99"), (b"Host", b"outside:8000")]
    return await ControlDesk(app).answer(messages.Control(7, "GET", target, headers, b""))


async def test_the_clients_headers_arrive_without_those_of_its_connection() -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        names = {name for name, _ in scope["headers"]}
        assert (b"authorization", b"Bearer k") in scope["headers"]
        assert (b"host", b"outside:8000") in scope["headers"]
        assert b"content-length" not in names
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    assert await answer(app) == messages.ControlReply(7, 200, [], b"ok")


async def test_an_application_that_fails_is_a_500() -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("no")

    assert (await answer(app)).status == 500


async def test_an_application_that_does_not_answer_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_WITHIN_S", 0.01)

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        while True:
            await receive()

    assert (await answer(app)).status == 504


async def test_a_target_that_is_none_is_a_400() -> None:
    assert (await answer(None, "/health\n")).status == 400
