"""Decides the status line of an event stream only when its first event is known.

vLLM answers 200 and starts the stream before the engine has said anything, so an error would arrive inside a
successful reply. This pure ASGI middleware holds the response start back until the first body chunk: if that is an
error event, the client gets the error's own status and a plain JSON body instead. After an error in mid-stream
nothing more is sent, least of all `[DONE]`. An exception that vLLM lets escape from a stream (the Responses API does)
becomes an error event instead of a connection that breaks off. Replies that say "later" say when: `Retry-After`.
"""

import json
import logging
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.middleware.error_reply import envelope, error_event, retry_after
from proxy.middleware.request_context import CURRENT, RequestContext

log = logging.getLogger("twinpool.proxy")

_ERROR_PREFIXES = (b'data: {"error"', b"event: error\n")
TRY_LATER = (429, 503, 504)
RETRY_AFTER_S = 1.0
"""Where nothing better is known."""
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class StatusLine:
    """The middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext()
        response = _HeldStart(send, context)
        token = CURRENT.set(context)
        try:
            await self._app(scope, receive, response)
        except Exception as error:
            if not await response.end_with(error):
                raise
            label = Headers(scope=scope).get("x-request-id", "")[:200]
            log.warning("stream_failed path=%s x_request_id=%s error=%s", scope.get("path"), label, error)
        finally:
            CURRENT.reset(token)


class _HeldStart:
    """Sends of one response."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self._held: Message | None = None
        self._is_stream = False
        self._streams = False
        """It has begun, with something that is no error."""
        self._over = False

    def __call__(self, message: Message) -> Awaitable[None]:
        # Called for every event: those in the middle of a stream go on without a coroutine of ours around them.
        in_the_middle = self._streams and message.get("more_body", False)
        if in_the_middle and not bytes(message.get("body", b"")).startswith(_ERROR_PREFIXES):
            return self._send(message)
        return self._take(message)

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if _is_event_stream(message):
                self._is_stream, self._held = True, message
            else:
                await self._send_start(message)
            return
        if not self._is_stream or message["type"] != "http.response.body":
            await self._send(message)
            return
        if self._over:
            return
        body = bytes(message.get("body", b""))
        self._over = not message.get("more_body", False)
        if self._held is not None:
            if not body and message.get("more_body", False):
                return
            start, self._held = self._held, None
            error = first_error(body)
            if error is not None:
                self._over = True
                await self._send_error(start, error)
                return
            start["headers"] = [*_without(start.get("headers", ()), dict(STREAM_HEADERS)), *STREAM_HEADERS]
            await self._send_start(start)
        self._streams = not self._over
        if body.startswith(_ERROR_PREFIXES):
            self._over, self._streams = True, False
            await self._send({"type": "http.response.body", "body": _first_event(body), "more_body": False})
            return
        await self._send(message)

    async def end_with(self, error: Exception) -> bool:
        """Ends a stream whose maker failed; False if this is no stream, or it has ended."""
        if not self._is_stream or self._over:
            return False
        self._over, self._streams = True, False
        told = envelope_of(error)
        if self._held is not None:
            await self._send_error(self._held, told)
            return True
        await self._send({"type": "http.response.body", "body": error_event(told), "more_body": False})
        return True

    async def _send_error(self, start: Message, error: dict[str, Any]) -> None:
        body = json.dumps(error).encode()
        replaced = {b"content-type": b"", b"content-length": b""}
        headers = [
            *_without(start.get("headers", ()), replaced),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send_start({"type": "http.response.start", "status": error_status(error), "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_start(self, start: Message) -> None:
        if start["status"] in TRY_LATER:
            headers = list(start.get("headers", ()))
            if not any(bytes(name).lower() == b"retry-after" for name, _ in headers):
                after_s = self._context.retry_after_s if self._context.retry_after_s is not None else RETRY_AFTER_S
                start["headers"] = [*headers, retry_after(after_s)]
        await self._send(start)


def _is_event_stream(message: Message) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", ())}
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


def _without(headers: Any, names: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if bytes(name).lower() not in names]


def _first_event(body: bytes) -> bytes:
    event, separator, _ = body.partition(b"\n\n")
    return event + separator


def first_error(body: bytes) -> dict[str, Any] | None:
    """The error of a stream that begins with an error event: `{"error": {...}}`; None if it begins otherwise."""
    if not body.startswith(_ERROR_PREFIXES):
        return None
    lines = _first_event(body).split(b"\n")
    data = b"".join(line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:"))
    try:
        error = json.loads(data)
    except ValueError:
        return None
    return error if isinstance(error, dict) and isinstance(error.get("error"), dict) else None


def envelope_of(error: BaseException) -> dict[str, Any]:
    """OpenAI's error envelope for an exception; vLLM's `GracefulHTTPError` in its chain says status and message."""
    cause: BaseException | None = error
    while cause is not None:
        status, message = getattr(cause, "http_status", None), getattr(cause, "message", None)
        if isinstance(status, int) and isinstance(message, str):
            return envelope(status, message, kind=HTTPStatus(status).phrase)
        cause = cause.__cause__ or cause.__context__
    return envelope(500, "Internal server error", kind="InternalServerError")


def error_status(error: dict[str, Any]) -> int:
    """The HTTP status in vLLM's error envelope; 500 if it has none."""
    code = error["error"].get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500
