"""The routes `/health` and `/ready`, for whoever restarts the server or sends it requests."""

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from proxy.health.readiness import Readiness

Reasons = Callable[[], list[str]]


def probe_routes(unhealthy: Reasons, readiness: Readiness, sleep: Callable[[], str] = lambda: "") -> list[Route]:
    """To be put before vLLM's own routes. 200, or 503 with the reasons; `unhealthy` and `readiness` give them.

    A cluster that sleeps is healthy and not ready, and says what it does (`sleep`).
    """

    async def health(_request: Request) -> JSONResponse:
        return _answer("healthy", unhealthy(), sleep())

    async def ready(_request: Request) -> JSONResponse:
        reasons = unhealthy()
        if not reasons and (reason := await readiness.reason()):
            reasons = [reason]
        return _answer("ready", reasons, sleep())

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/ready", ready, methods=["GET"]),
    ]


def _answer(what: str, reasons: Sequence[str], sleep: str = "") -> JSONResponse:
    if reasons:
        return JSONResponse({"status": sleep or f"not {what}", "reasons": list(reasons)}, status_code=503)
    return JSONResponse({"status": sleep or what})
