"""Errors that the proxy answers with itself, in the style of the API that was called."""

import json
import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.types import Scope, Send

CLOSE = (b"connection", b"close")
"""Of a connection on which what still comes of this request could be taken for another."""
RETRY_AFTER_LIMIT_S = 600
_OPENAI_KINDS = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError"}
_ANTHROPIC_KINDS = {400: "invalid_request_error", 403: "permission_error"}
_POLICY_VIOLATION = 1008
_LONGEST_REASON = 120


def envelope(status: int, message: str, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `kind` is its type, if it has one of its own."""
    kind = kind or _OPENAI_KINDS.get(status, HTTPStatus(status).phrase)
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}


def error_event(error: dict[str, Any]) -> bytes:
    """An `envelope` as the last event of a stream whose events have names."""
    told = error["error"]
    event = {"type": "error", "code": str(told["code"]), "message": told["message"], "param": None, **error}
    return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """The header; in whole seconds, at least one."""
    return b"retry-after", str(math.ceil(min(max(seconds, 1), RETRY_AFTER_LIMIT_S))).encode()


async def send_error(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    param: str | None = None,
    more_headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Answers a request with OpenAI's error envelope, or Anthropic's on its path."""
    error = envelope(status, message, param)
    if str(scope.get("path", "")).endswith("/v1/messages"):
        error = {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, "api_error"), "message": message}}
    body = json.dumps(error).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse_websocket(send: Send, reason: str) -> None:
    """Before it was accepted."""
    await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason[:_LONGEST_REASON]})
