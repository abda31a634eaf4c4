"""Finds out what a request may expect, and puts it where `ClusterClient.add_request_async` finds it.

The innermost middleware: what authentication turns away never gets here. The body is looked at only if the model's
name can decide.
"""

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.middleware.error_reply import refuse_websocket, send_error
from proxy.middleware.request_body import read_body, replaying
from proxy.middleware.request_context import CURRENT, RequestContext
from proxy.slo.rules import ClassOfOthers, SloRules, UnknownClass

CLASS_HEADER = b"x-slo-class"


def find_standings(app: Starlette, rules: SloRules) -> None:
    """Puts the middleware into an application whose other middlewares are stacked already."""
    # The last one is innermost.
    app.user_middleware.append(Middleware(RequestStanding, rules=rules))
    app.middleware_stack = None


class _NamesModel(msgspec.Struct):
    model: str | None = None


_BODY = msgspec.json.Decoder(_NamesModel)


class RequestStanding:
    """A pure ASGI middleware."""

    def __init__(self, app: ASGIApp, rules: SloRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket" and (scope["type"] != "http" or scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        header, api_key = said_by_headers(scope.get("headers", ()))
        model = ""
        if self._rules.needs_model and scope["type"] == "http" and not header:
            # Whole already: the guard, further out, has read it.
            body = await read_body(scope, receive)
            model, receive = model_of(body), replaying(body, receive)
        try:
            standing = self._rules.standing(header, api_key, model)
        except (UnknownClass, ClassOfOthers) as error:
            if scope["type"] == "websocket":
                await refuse_websocket(send, str(error))
                return
            await send_error(scope, send, 403 if isinstance(error, ClassOfOthers) else 400, str(error), "X-Slo-Class")
            return
        context = CURRENT.get()
        if context is None:
            context = RequestContext()
            CURRENT.set(context)
        context.standing, context.priority_range = standing, self._rules.priority_range
        await self._app(scope, receive, send)


def said_by_headers(headers: Any) -> tuple[str, str]:
    """The class and the API key that a request names; empty if it does not.

    Of several keys the first counts, which is the one that was checked.
    """
    name, api_key = "", None
    for field, value in headers:
        lower = bytes(field).lower()
        if lower == CLASS_HEADER:
            name = bytes(value).decode("latin-1").strip()
        elif lower == b"authorization" and api_key is None:
            scheme, _, token = bytes(value).decode("latin-1").partition(" ")
            api_key = token if scheme.lower() == "bearer" else ""
    return name, api_key or ""


def model_of(body: bytes) -> str:
    """The model that a JSON body names; empty if it is none, or names none."""
    try:
        return _BODY.decode(body).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # vLLM answers what it answers to such a body
