"""`/admin/models`: which models there are. The front has checked the API key."""

import asyncio
import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from cluster.models.added_models import AddedModels
from cluster.models.config import ModelConfig, ModelsConfig
from cluster.models.messages import ModelList, ModelRemoval, ModelStatus
from cluster.models.models_file import check_options, read_model
from cluster.orders import Refusal, RefusalText
from cluster.preflight.config_file import validated
from cluster.preflight.problems import ConfigError
from proxy.middleware.request_body import BodyStalled, BodyTooLarge, ClientLeft, read_body
from proxy.models.keeper import Keeper, ModelsRefused

log = logging.getLogger("twinpool.models")

_MAX_BODY_BYTES = 1 << 20


class Administration:
    """The routes."""

    def __init__(self, keeper: Keeper, configured: Collection[str] = (), added: AddedModels | None = None) -> None:
        """`configured`: the models that the configuration names. `added` remembers the others; None: nothing does."""
        self._keeper = keeper
        self._configured = configured
        self._added = added

    def add_to(self, router: Router) -> None:
        """Adds them to a router."""
        router.add_route("/admin/models", self._list, ["GET"])
        router.add_route("/admin/models", self._add, ["POST"])
        router.add_route("/admin/models/{name:path}", self._remove, ["DELETE"])

    async def _list(self, _request: Request) -> Response:
        models = self._keeper.status()
        kept = [self._with_prospects(model) for model in models.models]
        return _reply(200, ModelList(kept, models.capacity, models.used))

    async def _add(self, request: Request) -> Response:
        try:
            body = await read_body(request.scope, request.receive, _MAX_BODY_BYTES)
            tree = msgspec.json.decode(body, type=dict[str, Any])
            name = tree.pop("name", None)
            if not isinstance(name, str) or not name:
                return _refusal(400, "the field name is missing; it is the name under which clients ask for the model")
            # As a part of the whole, so that the name is checked and errors name the field.
            model: ModelConfig = validated(ModelsConfig, {"models": {name: tree}}).models[name]
            if model.config is not None:
                return _refusal(400, "config names a file of the server; send what is in it as the field cluster")
            spec = read_model(name, model, Path())
            await asyncio.to_thread(check_options, spec)  # reads vLLM's source
            status = self._keeper.add(spec)
            await self._remember(name, model)
            return _reply(201, self._with_prospects(status))
        except (BodyTooLarge, ClientLeft):
            return _refusal(413, f"a model is described in less than {_MAX_BODY_BYTES} bytes")
        except BodyStalled:
            return _refusal(408, "the description of the model stopped coming")
        except (msgspec.DecodeError, RecursionError) as error:
            return _refusal(400, f"this is no model: {error}")
        except ConfigError as error:
            return _refusal(400, " ".join(str(problem) for problem in error.problems))
        except ModelsRefused as error:
            return _refusal(error.status, str(error))

    async def _remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            text = request.query_params.get("timeout_s")
            within_s = float(text) if text is not None else None
            if within_s is not None and not 0 <= within_s < math.inf:
                raise ValueError
        except ValueError:
            return _refusal(400, "timeout_s is no number of seconds")
        try:
            by_s = self._keeper.remove(name, within_s)
        except ModelsRefused as error:
            return _refusal(error.status, str(error))
        await self._forget(name)
        return _reply(202, ModelRemoval(name, by_s, returns=self._is_kept(name)))

    # What is there after the next start.

    async def _remember(self, name: str, model: ModelConfig) -> None:
        if self._added is None or name in self._configured:
            return
        try:
            await self._added.put(name, model)
        except OSError as error:  # the model serves all the same, and the reply says that it is not kept
            log.error("model_not_remembered model=%s error=%s", name, error)

    async def _forget(self, name: str) -> None:
        if self._added is None:
            return
        try:
            await self._added.drop(name)
        except OSError as error:
            log.error("model_not_forgotten model=%s error=%s", name, error)

    def _is_kept(self, name: str) -> bool:
        return name in self._configured or (self._added is not None and name in self._added)

    def _with_prospects(self, model: ModelStatus) -> ModelStatus:
        return msgspec.structs.replace(model, kept=self._is_kept(model.name))


def _refusal(status: int, message: str) -> Response:
    return _reply(status, Refusal(RefusalText(message, status)))


def _reply(status: int, body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
