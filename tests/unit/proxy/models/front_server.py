"""A real front on a port, before models that are small HTTP servers on unix sockets in this process."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from cluster.models.added_models import AddedModels
from cluster.models.config import ModelsConfig
from cluster.models.models_file import ModelSpec, read_model
from cluster.preflight.config_file import validated
from proxy.models.administration import Administration
from proxy.models.children import Child
from proxy.models.front import ApiKeys, Front
from proxy.models.keeper import Keeper
from proxy.models.metrics import FrontMetrics
from proxy.models.serve import QuietServer, http_config

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DEADLINE_S = 30.0
MODEL = web.AppKey("model", str)


@dataclass
class FakeModels:
    """Takes the place of `Children`: a model is an HTTP server, up as soon as it may be."""

    directory: Path
    handler: Handler
    keeper: Keeper | None = None
    held: set[str] = field(default_factory=set)
    """Models whose start does not end by itself."""
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    turned: list[tuple[str, str]] = field(default_factory=list)
    """Orders to sleep and to wake."""
    sleepless: set[str] = field(default_factory=set)
    """Models that do not wake up."""
    _children: dict[str, Child] = field(default_factory=dict)
    _runners: dict[str, web.AppRunner] = field(default_factory=dict)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def find(self, name: str) -> Child | None:
        return self._children.get(name)

    def start(self, spec: ModelSpec) -> None:
        self.started.append(spec.name)
        path = self.directory / f"{len(self.started)}.sock"
        session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), auto_decompress=False)
        exited = asyncio.get_running_loop().create_future()
        self._children[spec.name] = Child(spec, path, self.directory / "log", session, exited)
        if spec.name not in self.held:
            self._spawn(self.finish_start(spec.name))

    async def finish_start(self, name: str) -> None:
        app = web.Application(client_max_size=1 << 30)
        app[MODEL] = name
        app.router.add_route("*", "/{path:.*}", self.handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.UnixSite(runner, str(self._children[name].socket)).start()
        self._runners[name] = runner
        assert self.keeper is not None
        self.keeper.up(name, 1.0)

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        self._spawn(self._end(name, ""))

    def sleep(self, name: str) -> None:
        self.turned.append(("sleep", name))
        self._spawn(self._turned("asleep", name))

    def wake(self, name: str) -> None:
        self.turned.append(("wake", name))
        self._spawn(self._turned("stuck" if name in self.sleepless else "woken", name))

    async def _turned(self, what: str, name: str) -> None:
        assert self.keeper is not None
        if what == "stuck":
            self.keeper.stuck(name, "out of memory")
        else:
            (self.keeper.asleep if what == "asleep" else self.keeper.woken)(name, 0.5)

    async def crash(self, name: str, cause: str = "it crashed") -> None:
        await self._end(name, cause)

    async def _end(self, name: str, cause: str) -> None:
        child = self._children.pop(name)
        await child.session.close()
        if (runner := self._runners.pop(name, None)) is not None:
            await runner.cleanup()
        assert self.keeper is not None
        self.keeper.down(name, cause)

    def stop_listening(self, name: str) -> None:
        """Its socket is gone, and nobody has noticed."""
        self._children[name].socket.unlink()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)
        for child in self._children.values():
            await child.session.close()
        for runner in self._runners.values():
            await runner.cleanup()


@dataclass(frozen=True)
class Running:
    """What a test works with."""

    http: aiohttp.ClientSession
    """Speaks to the front."""
    keeper: Keeper
    models: FakeModels
    port: int

    async def metric(self, name: str) -> float:
        """The value of a sample by its name with labels; 0 if there is none."""
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"twinpool_front_{name} ")), 0.0)

    async def until_metric(self, name: str, value: float) -> None:
        """Returns when a sample has this value; what is counted is counted when a reply is complete."""

        async def has_it() -> bool:
            return await self.metric(name) == value

        await until(has_it)

    async def running(self, name: str) -> int:
        return next((model.running for model in self.keeper.status().models if model.name == name), 0)

    async def waiting(self, name: str) -> int:
        return next((model.waiting for model in self.keeper.status().models if model.name == name), 0)


@asynccontextmanager
async def front(
    directory: Path,
    handler: Handler,
    *,
    held: tuple[str, ...] = (),
    keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    max_body_bytes: int = 1 << 20,
    remembered: AddedModels | None = None,
    **tree: Any,
) -> AsyncIterator[Running]:
    """`tree` is the configuration: models and what else there is."""
    config = validated(ModelsConfig, tree)
    specs = [read_model(name, model, directory) for name, model in config.models.items()]
    metrics = FrontMetrics()
    keeper = Keeper(config, metrics, lambda _text: None)
    models = FakeModels(directory, handler, keeper, set(held))
    administration = Administration(keeper, frozenset(config.models), remembered)
    api, admin = ApiKeys([*keys, *admin_keys]), ApiKeys(admin_keys or keys)
    app = Front(keeper, api, admin, metrics, max_body_bytes, administration)
    http = http_config(app, config.server)
    server = QuietServer(http)
    server.lifespan = http.lifespan_class(http)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        # Not `serve`, which ends after two pauses.
        await server.startup(sockets=[listening])
        try:
            keeper.attach(models, specs)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as client:
                yield Running(client, keeper, models, listening.getsockname()[1])
        finally:
            keeper.close()
            for each in server.servers:
                each.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            await asyncio.wait_for(asyncio.gather(*server.server_state.tasks), DEADLINE_S)
            await models.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns when it holds; fails at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def echo(request: web.Request) -> web.StreamResponse:
    """Says what came to which model; lists the model if asked."""
    name = request.app[MODEL]
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model", "max_model_len": 7}]})
    told = {
        "model": name,
        "method": request.method,
        "path": request.raw_path,
        "headers": [[key.lower(), value] for key, value in request.headers.items()],
        "body": (await request.read()).decode("latin-1"),
    }
    return web.json_response(told)


def asks(model: str, **fields: Any) -> dict[str, Any]:
    """Arguments of a POST with a JSON body."""
    return {"data": json.dumps({"model": model, **fields}), "headers": {"Content-Type": "application/json"}}
