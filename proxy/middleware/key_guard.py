"""Asks for the API key, before anything of a request is read.

vLLM's own check covers paths that begin like an API. Here everything is covered but what a load balancer asks without a
key: state, orders and metrics say who uses the cluster and can stop it. The outermost middleware.
"""

import json
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.middleware.error_reply import refuse_websocket, send_error

_REFUSAL = "the API key is missing or wrong"
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_CHALLENGE = (b"www-authenticate", b"Bearer")


def ask_for_key(app: Starlette, may: Callable[[Headers], bool], on_refused: Callable[[], None]) -> None:
    """Puts the middleware around an application whose other middlewares are stacked already.

    Args:
        app: which `proxy.frontend` serves.
        may: whether headers hold a key.
        on_refused: called for every request that is turned away.
    """
    app.user_middleware.insert(0, Middleware(KeyGuard, may=may, on_refused=on_refused))
    app.middleware_stack = None


class KeyGuard:
    """A pure ASGI middleware."""

    def __init__(self, app: ASGIApp, may: Callable[[Headers], bool], on_refused: Callable[[], None]) -> None:
        self._app = app
        self._may = may
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        said = Headers(scope=scope) if kind in ("http", "websocket") else Headers()
        if kind not in ("http", "websocket") or is_open(scope, said) or self._may(said):
            await self._app(scope, receive, send)
            return
        self._on_refused()
        if kind == "websocket":
            await receive()
            await refuse_websocket(send, _REFUSAL)
        elif path_of(scope).startswith("/v1"):
            # Word for word what vLLM says there.
            body = json.dumps({"error": "Unauthorized"}, separators=(",", ":")).encode()
            headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await send_error(scope, send, 401, _REFUSAL, None, [_CHALLENGE])


def is_open(scope: Scope, headers: Headers) -> bool:
    """Whether a request needs no key."""
    return path_of(scope) in OPEN_PATHS or is_preflight(scope, headers)


def is_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether a browser asks, without a key, what it may ask; vLLM's CORS middleware answers before any route.

    Every other OPTIONS reaches the routes, of which `/metrics` answers it as it does a GET.
    """
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def path_of(scope: Scope) -> str:
    """Below the path that the application is mounted at."""
    return str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
