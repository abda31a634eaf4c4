"""Error replies that middlewares send themselves, in the style of the API that was called."""

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.types import Scope, Send


async def send_error(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    param: str | None = None,
    more_headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Answers a request with OpenAI's error envelope, or Anthropic's on its path."""
    error: dict[str, Any]
    if str(scope.get("path", "")).endswith("/v1/messages"):
        kind = {400: "invalid_request_error", 403: "permission_error"}.get(status, "api_error")
        error = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        kind = {400: "BadRequestError", 403: "PermissionDeniedError"}.get(status, HTTPStatus(status).phrase)
        error = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    body = json.dumps(error).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
