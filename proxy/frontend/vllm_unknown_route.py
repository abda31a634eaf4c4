"""A path that is not served is answered with those that are.

Relies on vLLM 0.32: `http_exception_handler`, which answers every other 404. They are counted by vLLM's
`http_requests_total{handler="none"}`.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler

from proxy.middleware.error_reply import envelope

NO_ROUTE = "Not Found"
"""What Starlette says when nothing matched; whoever raises a 404 on purpose says more."""


def name_the_routes(app: FastAPI) -> None:
    """Has unknown paths answered by a list of the known ones."""

    async def answer(request: Request, error: Any) -> Response:
        if error.detail != NO_ROUTE:
            response: Response = await http_exception_handler(request, error)
            return response
        message = f"{request.method} {request.url.path[:200]} is not served here; what is: {', '.join(served(app))}"
        return JSONResponse(envelope(404, message), status_code=404)

    app.add_exception_handler(404, answer)


def served(app: FastAPI) -> list[str]:
    """Paths of the API that take requests, in order."""
    routes = [route for route in app.routes if "POST" in (getattr(route, "methods", None) or ())]
    return sorted({path for route in routes if (path := str(getattr(route, "path", ""))).startswith("/v1/")})
