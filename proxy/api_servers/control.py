"""HTTP requests that concern the cluster, whichever API server process they reach: state, health, workers, adapters.

A further process passes them on as they are (`ControlForward`); the process beside the dispatcher runs them through
its own application (`ControlDesk`), so a route is written once and answers the same everywhere.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.orders import SCALE_PATH
from proxy.api_servers import messages
from proxy.middleware.error_reply import envelope
from proxy.middleware.request_body import BodyStalled, BodyTooLarge, ClientLeft, read_body

PREFIX = "/twinpool/"
PATHS = frozenset({
    "/health", "/ready", "/ping", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    SCALE_PATH,
})  # fmt: skip
MAX_BODY_BYTES = 1 << 20
ANSWER_WITHIN_S = 120.0
"""Longer than an engine call to every worker may take."""
NO_ANSWER = "the process that has the workers did not answer in time; try again, or see the log of twinpool serve"
_NOT_PASSED_ON = frozenset({b"connection", b"content-length", b"expect", b"keep-alive", b"transfer-encoding"})


class ControlDesk:
    """Answers control requests with an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        # No environment: a proxy of the operator's shell has no part in this.
        self._client = httpx.AsyncClient(transport=transport, base_url="http://twinpool", trust_env=False)

    async def answer(self, control: messages.Control) -> messages.ControlReply:
        """Runs the request. The application's own failure is a 500, its silence a 504."""
        headers = [(name, value) for name, value in control.headers if name.lower() not in _NOT_PASSED_ON]
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                response = await self._client.request(
                    control.method, control.target, headers=headers, content=control.body or None
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return error_reply(control.call_id, 400, f"not a request that can be passed on: {error}")
        except TimeoutError:
            message = f"{control.method} {control.target} took longer than {ANSWER_WITHIN_S:g} s"
            return error_reply(control.call_id, 504, message)
        kept = [(name, value) for name, value in response.headers.raw if name.lower() not in _NOT_PASSED_ON]
        return messages.ControlReply(control.call_id, response.status_code, kept, response.content)


class ControlForward:
    """ASGI: control requests go to `ask`, everything else to `app`.

    `ask(method, target, headers, body)` returns the reply, or None if there was none in time.
    """

    def __init__(self, app: ASGIApp, ask: "Ask") -> None:
        self._app = app
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_control(str(scope["path"])):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, MAX_BODY_BYTES)
        except ClientLeft:
            return  # what it had sent until then may mean something else than the whole
        except BodyTooLarge:
            await _send_reply(send, error_reply(0, 413, f"the body is longer than {MAX_BODY_BYTES} bytes"))
            return
        except BodyStalled as error:
            await _send_reply(send, error_reply(0, 408, str(error)))
            return
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        reply = await self._ask(
            str(scope["method"]), f"{path}?{query}" if query else path, list(scope["headers"]), body
        )
        await _send_reply(send, reply or error_reply(0, 503, NO_ANSWER))


Ask = Callable[[str, str, list[tuple[bytes, bytes]], bytes], Awaitable[messages.ControlReply | None]]


def is_control(path: str) -> bool:
    """Whether a request for this path concerns the cluster."""
    return path in PATHS or path.startswith(PREFIX)


def error_reply(call_id: int, status: int, message: str) -> messages.ControlReply:
    """OpenAI's error envelope as a reply."""
    body = json.dumps(envelope(status, message)).encode()
    return messages.ControlReply(call_id, status, [(b"content-type", b"application/json")], body)


async def _send_reply(send: Send, reply: messages.ControlReply) -> None:
    headers = [*reply.headers, (b"content-length", str(len(reply.body)).encode())]
    start: Message = {"type": "http.response.start", "status": reply.status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": reply.body})
