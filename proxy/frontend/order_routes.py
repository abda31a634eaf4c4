"""`POST /twinpool/...` and `/admin/scale`: orders about workers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.orders import (
    SCALE_PATH,
    Accepted,
    CloseOrder,
    DrainOrder,
    Refusal,
    RefusalText,
    RestartOrder,
    RoleOrder,
    ScaleOrder,
    SleepOrder,
    Slept,
    WakeOrder,
)
from proxy.workers.administration import Administration, OrderRefused
from proxy.workers.sleeping import Sleeping

Order = TypeVar("Order", DrainOrder, RoleOrder, RestartOrder, ScaleOrder, CloseOrder)
Turn = TypeVar("Turn", SleepOrder, WakeOrder)


def add_order_routes(app: FastAPI, administration: Administration, close: Callable[[], None]) -> None:
    """`close` ends admissions. Who may give orders is not decided here (`key_guard`)."""

    async def carry_out(request: Request, kind: type[Order], act: Callable[[Order], Accepted]) -> Response:
        try:
            order = msgspec.json.decode(await request.body() or b"{}", type=kind)
            return _reply(202, act(order))
        except msgspec.DecodeError as error:  # also for fields that are wrong
            return _reply(400, _refusal(400, f"this is no order for {request.url.path}: {error}"))
        except OrderRefused as refused:
            return _reply(refused.status, _refusal(refused.status, str(refused)))

    @app.post("/twinpool/workers/{worker_id}/drain")
    async def drain(worker_id: str, request: Request) -> Response:
        return await carry_out(request, DrainOrder, lambda order: administration.drain(worker_id, order))

    @app.post("/twinpool/workers/{worker_id}/role")
    async def role(worker_id: str, request: Request) -> Response:
        return await carry_out(request, RoleOrder, lambda order: administration.set_role(worker_id, order))

    @app.post("/twinpool/restart")
    async def restart(request: Request) -> Response:
        return await carry_out(request, RestartOrder, administration.restart)

    @app.post(SCALE_PATH)
    async def scale(request: Request) -> Response:
        return await carry_out(request, ScaleOrder, administration.scale)

    @app.post("/twinpool/close")
    async def close_cluster(request: Request) -> Response:
        def act(_order: CloseOrder) -> Accepted:
            close()
            return Accepted("the cluster finishes what it has and takes no new requests", [], 0.0)

        return await carry_out(request, CloseOrder, act)


def add_sleep_routes(app: FastAPI, sleeping: Sleeping) -> None:
    """Both answer when it is done. An order goes on when whoever gave it leaves."""
    under_way: set[asyncio.Task[Slept]] = set()

    async def carry_out(
        request: Request, kind: type[Turn], act: Callable[[Turn], Coroutine[Any, Any, Slept]]
    ) -> Response:
        try:
            order = msgspec.json.decode(await request.body() or b"{}", type=kind)
            task = asyncio.create_task(act(order), name=request.url.path)
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            return _reply(200, await asyncio.shield(task))
        except msgspec.DecodeError as error:
            return _reply(400, _refusal(400, f"this is no order for {request.url.path}: {error}"))
        except OrderRefused as refused:
            return _reply(refused.status, _refusal(refused.status, str(refused)))

    @app.post("/twinpool/sleep")
    async def sleep(request: Request) -> Response:
        return await carry_out(request, SleepOrder, sleeping.sleep)

    @app.post("/twinpool/wake")
    async def wake(request: Request) -> Response:
        return await carry_out(request, WakeOrder, sleeping.wake)


def _refusal(code: int, message: str) -> Refusal:
    return Refusal(RefusalText(message, code))


def _reply(status: int, body: Accepted | Slept | Refusal) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
