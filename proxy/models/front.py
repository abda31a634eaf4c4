"""The application of the front: API keys, its own routes, and everything else passed on to a model."""

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from proxy.middleware.error_reply import CLOSE, envelope, refuse_websocket, retry_after, send_error
from proxy.middleware.request_body import BodyStalled, BodyTooLarge, ClientLeft, read_body
from proxy.models.administration import Administration
from proxy.models.answers import Refused
from proxy.models.forwarding import (
    Ended,
    Sending,
    carried_out,
    pass_on,
)
from proxy.models.keeper import Keeper, RequestRefused
from proxy.models.metrics import FrontMetrics
from proxy.models.routing import Target, find_target, is_order

log = logging.getLogger("twinpool.models")

OPEN_PATHS = ("/health", "/ready")
"""Answered by the front itself, without a key."""
_LIST_TIMEOUT_S = 5.0
_LEARN_EVERY_S = 1.0


class ApiKeys:
    """Checks `Authorization: Bearer KEY` as vLLM's API server does. Keeps digests only."""

    def __init__(self, keys: Sequence[str]) -> None:
        """No keys: everybody may."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def admits_everybody(self) -> bool:
        """Whether there are no keys."""
        return not self._digests

    def admit(self, headers: Headers) -> bool:
        """Whether a request carries one of the keys."""
        if not self._digests:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        found = False
        for known in self._digests:  # all of them, so that the time tells nothing
            found |= secrets.compare_digest(digest, known)
        return found and scheme.lower() == "bearer"


class Front:
    """An ASGI application."""

    def __init__(
        self,
        keeper: Keeper,
        keys: ApiKeys,
        admin_keys: ApiKeys,
        metrics: FrontMetrics,
        max_body_bytes: int,
        administration: Administration | None = None,
    ) -> None:
        """`admin_keys` are for orders (`is_order`), `keys` for everything else. Without `administration`, one that
        remembers nothing."""
        self._keeper = keeper
        self._keys = keys
        self._admin_keys = admin_keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._cards: dict[str, list[dict[str, Any]]] = {}
        self._learned_s = -math.inf
        self._created_s = int(time.time())
        self._own = Router(redirect_slashes=False, default=self._pass_on)
        self._own.add_route("/health", self._health, ["GET"])
        self._own.add_route("/ready", self._ready, ["GET"])
        self._own.add_route("/metrics", self._show_metrics, ["GET"])
        self._own.add_route("/v1/models", self._models, ["GET"])
        self._own.add_route("/v1/models/{name:path}", self._model, ["GET"])
        (administration or Administration(keeper)).add_to(self._own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await refuse_websocket(send, "not served with several models")
            return
        headers = Headers(scope=scope)
        is_an_order = is_order(scope["method"], scope["path"])
        keys = self._admin_keys if is_an_order else self._keys
        if scope["path"] not in OPEN_PATHS and not keys.admit(headers):
            self._metrics.rejected.labels("", "unauthorized").inc()
            challenge = [(b"www-authenticate", b"Bearer")]
            await send_error(scope, send, 401, "The API key is missing or wrong", None, challenge)
            return
        if is_an_order and self._admin_keys.admits_everybody and "origin" in headers:
            # Any page that a browser of this machine shows could send it, and so start processes.
            self._metrics.rejected.labels("", "web_page").inc()
            text = "Orders from web pages need an API key; set server.admin_key"
            await send_error(scope, send, 403, text)
            return
        await self._own(scope, receive, send)

    # What is passed on.

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
        except ClientLeft:
            return
        except BodyTooLarge:
            text = f"The body is longer than max_body_bytes={self._max_body_bytes}"
            await self._refuse(scope, send, "", Refused(413, "body_too_large", text))
            return
        except BodyStalled as error:
            await self._refuse(scope, send, "", Refused(408, "body_stalled", str(error)))
            return
        target = await self._target(scope, body)
        if isinstance(target, Refused):
            await self._refuse(scope, send, "", target)
            return
        sending = Sending(send)
        work = asyncio.create_task(self._carry_out(target, scope, body, sending), name=f"request to {target.model}")
        if not await carried_out(work, receive, sending):
            self._metrics.abandoned.labels(target.model).inc()

    async def _target(self, scope: Scope, body: bytes) -> Target | Refused:
        raw_path = bytes(scope.get("raw_path") or b"").partition(b"?")[0].decode("latin-1") or str(scope["path"])
        content_type = Headers(scope=scope).get("content-type", "")

        def find() -> Target | Refused:
            return find_target(
                str(scope["method"]), raw_path, content_type, body, self._keeper.listed(), self._keeper.names
            )

        target = find()
        unknown = isinstance(target, Refused) and target.reason == "unknown_model"
        if unknown and time.monotonic() - self._learned_s > _LEARN_EVERY_S:
            # Perhaps an adapter that was loaded meanwhile.
            await self._learn(Headers(scope=scope).get("authorization", ""))
            target = find()
        return target

    async def _carry_out(self, target: Target, scope: Scope, body: bytes, send: Send) -> None:
        if target.observes:
            child = self._keeper.child(target.model, or_asleep=True)
            if child is None:
                text = f"The model {target.model} is not up, and requests of this kind do not start it"
                await self._refuse(scope, send, target.model, Refused(503, "not_up", text, 5.0))
                return
            self._count(target.model, await pass_on(child.session, scope, target.path, body, send))
            return
        try:
            async with self._keeper.place(target.model) as child:
                self._count(target.model, await pass_on(child.session, scope, target.path, body, send))
        except RequestRefused as refused:
            await self._refuse(scope, send, target.model, refused.answer)

    def _count(self, model: str, ended: Ended) -> None:
        self._metrics.requests.labels(model, str(ended.status)).inc()
        if ended.broken:
            self._metrics.broken.labels(model).inc()

    async def _refuse(self, scope: Scope, send: Send, model: str, answer: Refused) -> None:
        self._metrics.rejected.labels(model, answer.reason).inc()
        headers: list[tuple[bytes, bytes]] = []
        if answer.retry_after_s is not None:
            headers.append(retry_after(answer.retry_after_s))
        if answer.status == 408:
            headers.append(CLOSE)
        param = "model" if answer.status == 404 else None
        await send_error(scope, send, answer.status, answer.text, param, headers)

    # The front's own routes.

    async def _health(self, _request: Request) -> Response:
        return Response()

    async def _ready(self, _request: Request) -> Response:
        missing = self._keeper.missing()
        if not missing:
            return Response()
        reason = f"these pinned models are not up: {', '.join(missing)}"
        return JSONResponse({"ready": False, "reasons": [reason]}, status_code=503)

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(self._keeper.metrics_text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        await self._learn(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": self._all_cards()})

    async def _model(self, request: Request) -> Response:
        await self._learn(request.headers.get("authorization", ""))
        name = request.path_params["name"]
        for card in self._all_cards():
            if card["id"] == name:
                return JSONResponse(card)
        return JSONResponse(envelope(404, Refused.unknown(name).text, "model"), status_code=404)

    def _all_cards(self) -> list[dict[str, Any]]:
        """As models describe themselves; one that was never up has a card of ours."""
        cards: list[dict[str, Any]] = []
        for name in self._keeper.listed():
            own = {"id": name, "object": "model", "created": self._created_s, "owned_by": "twinpool", "root": name}
            cards += self._cards.get(name) or [own]
        return cards

    async def _learn(self, authorization: str) -> None:
        """Asks the models that are up under which names they serve."""
        self._learned_s = time.monotonic()
        listed = self._keeper.listed()
        self._cards = {name: cards for name, cards in self._cards.items() if name in listed}
        await asyncio.gather(*(self._learn_of(name, authorization) for name in listed))

    async def _learn_of(self, name: str, authorization: str) -> None:
        child = self._keeper.child(name)
        if child is None:
            return
        headers = {"Authorization": authorization} if authorization else {}
        timeout = aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S)
        try:
            async with child.session.get("http://model/v1/models", headers=headers, timeout=timeout) as response:
                cards = msgspec.json.decode(await response.read(), type=_Cards).data if response.status == 200 else []
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("cards_unknown model=%s error=%s", name, error or type(error).__name__)
            return
        if cards:
            self._cards[name] = cards
            self._keeper.learn(name, [str(card.get("id")) for card in cards])


class _Cards(msgspec.Struct):
    data: list[dict[str, Any]]
