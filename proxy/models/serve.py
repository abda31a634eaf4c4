"""Puts the front of several models together, and takes it apart again. `cluster.terminal` loads it by name."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import uvicorn
import uvloop
from rich.console import Console
from starlette.types import ASGIApp

from cluster.config import ServerConfig
from cluster.launch.local import LaunchError, keep_logs_only, make_runtime_dir, remove_runtime_dir
from cluster.models.added_models import AddedModels, read_added
from cluster.models.config import FrontConfig, ModelConfig
from cluster.models.models_file import Models, check_access, check_models, read_model
from cluster.preflight.machine import detect_machine
from cluster.preflight.problems import ConfigError
from cluster.preflight.security_checks import API_KEY_VARIABLE
from cluster.terminal.interruption import Interruption
from proxy.listening import ListenError, listening_socket
from proxy.models.administration import Administration
from proxy.models.children import Children
from proxy.models.front import ApiKeys, Front
from proxy.models.keeper import Keeper, ModelsRefused
from proxy.models.metrics import FrontMetrics

EXIT_CONFIG = 2
EXIT_FAILED = 1
# Clusters end their streams with an error event and close; longer means that one is stuck.
_STREAMS_END_WITHIN_S = 5
_STOP_S = 60.0
_KEEP_ALIVE_S = 75


class QuietServer(uvicorn.Server):
    """Leaves signals to us, and tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


def run_models(models: Models, *, verbose: bool) -> NoReturn:
    """Serves until a signal comes, then leaves the process, with the exit codes of `proxy.serve.run_serve`."""
    console = Console(stderr=True, highlight=False)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    code = runner.run(_FrontRun(models, console, verbose).run())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _FrontRun:
    """One run, from the check of the configuration to the last process gone."""

    def __init__(self, models: Models, console: Console, verbose: bool) -> None:
        self._config = models.config
        self._specs = models.specs
        self._added_path = models.added_models
        self._console = console
        self._verbose = verbose

    async def run(self) -> int:
        """Returns the exit code; every process is gone then."""
        try:
            machine = detect_machine()
            check_access(self._config.server, machine.environ)
            check_models(self._specs, machine)
            added = read_added(self._added_path) if self._added_path is not None else {}
            listening = listening_socket(ServerConfig(host=self._config.server.host, port=self._config.server.port))
            runtime_dir = make_runtime_dir()
        except ConfigError as error:
            problems = "\n".join(f"  {problem}" for problem in error.problems)
            return self._fail(f"the configuration cannot be used:\n{problems}", EXIT_CONFIG)
        except (ListenError, LaunchError) as error:
            return self._fail(str(error), EXIT_FAILED)
        self._stop = asyncio.Event()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        metrics = FrontMetrics()
        keeper = Keeper(self._config, metrics, self._say)
        children = Children(
            *(runtime_dir, machine.environ, keeper.up, keeper.down, self._note_failure, self._config.silent_after_s),
            *(keeper.asleep, keeper.woken, keeper.stuck),
        )
        children.launcher.guard.removes(runtime_dir)
        interruption = Interruption(self._stop, children.launcher.stop_now, _STOP_S)
        api, admin = _keys(self._config.server)
        remembered = AddedModels(self._added_path, added) if self._added_path is not None else None
        administration = Administration(keeper, frozenset(self._config.models), remembered)
        limit = self._config.server.max_body_bytes
        front = Front(keeper, ApiKeys(api), ApiKeys(admin), metrics, limit, administration)
        http = QuietServer(http_config(front, self._config.server))
        serving = asyncio.create_task(http.serve(sockets=[listening]), name="http-server")
        code = 0
        try:
            keeper.attach(children, self._specs)
            if remembered is not None:
                await put_back(keeper, remembered, added, self._config.models, self._say)
            await self._serve(http, serving)
            interruption.noticed()
            if not self._stop.is_set():
                code = self._fail(self._cause(serving), EXIT_FAILED)
        finally:
            keeper.close()
            http.should_exit = True
            try:
                await children.close(_STOP_S)
            except LaunchError as error:
                code = self._fail(str(error), EXIT_FAILED)
            await asyncio.wait((serving,), timeout=_STREAMS_END_WITHIN_S + 2)
            self._tidy(runtime_dir)
        if interruption.signal_number:
            self._console.print("twinpool: stopped, every model is gone")
            return 128 + interruption.signal_number
        return code

    async def _serve(self, http: QuietServer, serving: "asyncio.Task[None]") -> None:
        """Until a signal comes, or something fails."""
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        up = asyncio.create_task(http.is_up.wait(), name="http-up")
        try:
            await asyncio.wait((stopped, serving, up), return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                print_invitation(self._config.server, [spec.name for spec in self._specs])
            await asyncio.wait((stopped, serving, self._failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            stopped.cancel()

    def _cause(self, serving: "asyncio.Task[None]") -> str:
        if self._failed.done():
            return f"the front failed: {self._failed.result()}"
        error = serving.exception() if serving.done() and not serving.cancelled() else None
        return f"the HTTP server ended: {error or 'by itself'}"

    def _note_failure(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(f"{type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        self._console.print(f"twinpool: {text}", markup=False, soft_wrap=True)

    def _fail(self, text: str, code: int) -> int:
        self._console.print(f"twinpool: {text}", style="red", markup=False, soft_wrap=True)
        return code

    def _tidy(self, runtime_dir: Path) -> None:
        if self._stop.is_set():
            remove_runtime_dir(runtime_dir)
        else:
            keep_logs_only(runtime_dir)
            self._console.print(f"twinpool: the logs are in {runtime_dir}", markup=False, soft_wrap=True)


async def put_back(
    keeper: Keeper,
    remembered: AddedModels,
    added: Mapping[str, ModelConfig],
    configured: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Puts models that were added once on the map again. One that cannot be there any more is told of and left out."""
    for name, model in added.items():
        if name in configured:
            say(f"{name} was added once and stands in the configuration now, which counts")
            with contextlib.suppress(OSError):  # then it is said again at the next start
                await remembered.drop(name)
            continue
        try:
            keeper.add(read_model(name, model, Path()))
        except (ConfigError, ModelsRefused) as error:
            say(f"{name}, which was added once, is left out: {error}")


def _keys(server: FrontConfig) -> tuple[list[str], list[str]]:
    """Keys for everything but `/admin`, and those for `/admin`. vLLM's variable counts where no key is given."""
    api = [key.get_secret_value() for key in server.api_key] or [
        key for key in [os.environ.get(API_KEY_VARIABLE, "")] if key
    ]
    admin = [key.get_secret_value() for key in server.admin_key]
    return ([*api, *admin] if api else []), (admin or api)


def http_config(app: ASGIApp, server: FrontConfig) -> uvicorn.Config:
    """How the front speaks HTTP."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        # The clusters send these.
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STREAMS_END_WITHIN_S,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
    )
    config.load()
    return config


def print_invitation(server: FrontConfig, names: list[str]) -> None:
    """Where the models are, on standard output."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    scheme = "https" if server.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"
    Console(highlight=False).print(
        f"\nServing {', '.join(names) or 'no models yet'} at {url}/v1 (Ctrl-C stops)\n\n"
        f"  twinpool model list --url {url}",
        markup=False,
        soft_wrap=True,
    )
    sys.stdout.flush()
