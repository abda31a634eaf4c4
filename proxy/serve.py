"""Puts a cluster together: configuration, model, workers, API server; and takes it apart again.

The composition root. `cluster.cli` loads it by name, because only here may both the launcher and the proxy be known.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import uvloop
from rich.console import Console

from cluster.config import ClusterConfig
from cluster.embedded_model import EMBEDDED_MODEL_NAME, EmbeddedModelError, ensure_embedded_model
from cluster.fleet.fleet import Fleet, WorkerDown
from cluster.fleet.launcher import Launcher, OnExit
from cluster.fleet.recruiting import Recruiter
from cluster.launch.guard import Guard
from cluster.launch.local import (
    LaunchError,
    LocalLauncher,
    WorkerCommand,
    WorkerExit,
    keep_logs_only,
    make_runtime_dir,
    remove_runtime_dir,
    worker_command,
)
from cluster.launch.worker_plan import WorkerPlan
from cluster.preflight.config_checks import Planned, check_config
from cluster.preflight.machine import Machine, detect_machine, engines_use_gpus, nodes_of_a_cluster
from cluster.preflight.model_facts import ModelFacts, read_model_facts
from cluster.preflight.problems import ConfigError
from cluster.preflight.security_checks import API_KEY_VARIABLE, api_keys
from cluster.ray_launch.launcher import RayLauncher
from cluster.simulated.launch import simulated_commands
from cluster.terminal.demo import DemoError, invitation, run_demo
from cluster.terminal.interruption import Interruption
from cluster.terminal.start_screen import StartScreen
from cluster.trust import KeyFileError, proxy_address, reached_at, with_trust
from proxy.api_servers.settings import api_server_commands, metrics_dir
from proxy.listening import ListenError, listening_socket

log = logging.getLogger("twinpool.serve")

SIMULATED_SUFFIX = "-simulated"

EXIT_CONFIG = 2
EXIT_FAILED = 1
# The API server ends open requests with an error event and closes; longer means that it is stuck.
_API_STOP_S = 5.0
_START_GRACE_S = 3.0


class ServeError(Exception):
    """The cluster could not start, or could not go on; the text says why and what to do."""


def run_serve(config: ClusterConfig, *, demo: bool, verbose: bool) -> NoReturn:
    """Serves until a signal comes, then leaves the process.

    The exit code is 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP, 2 for a configuration that cannot be used, 1 for
    another failure. Leaves with `os._exit`: an import of vLLM that still runs in a thread could not be waited for.
    """
    console = Console(stderr=True, highlight=False)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    code = runner.run(_Cluster(config, console, demo, verbose).run())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Cluster:
    """One run, from the check of the configuration to the last process gone."""

    def __init__(self, config: ClusterConfig, console: Console, demo: bool, verbose: bool) -> None:
        self._config = config
        self._console = console
        self._demo = demo
        self._verbose = verbose
        self._screen = StartScreen(console)
        self._runtime_dir: Path | None = None
        self._clean = True

    async def run(self) -> int:
        """Returns the exit code; every process is gone then."""
        self._stop = asyncio.Event()
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lost_at_start: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        self._exits: asyncio.Queue[WorkerDown] = asyncio.Queue()
        self._guard = Guard()
        self._fleet = Fleet(self._config.restart, self._on_worker_down, self._launcher)
        interruption = Interruption(self._stop, self._fleet.launcher.stop_now, self._config.stop_timeout_s)
        try:
            code = await self._serve_unless_stopped(interruption)
        except ConfigError as error:
            problems = "\n".join(f"  {problem}" for problem in error.problems)
            code = self._fail(f"the configuration cannot be used:\n{problems}", EXIT_CONFIG)
        except (ServeError, EmbeddedModelError, LaunchError) as error:
            code = self._fail(str(error), EXIT_FAILED)
        finally:
            await self._clean_up()
        if interruption.signal_number:
            self._console.print("twinpool: stopped, every worker is gone")
            return 128 + interruption.signal_number
        return code

    def _launcher(self, on_exit: OnExit) -> Launcher:
        if self._config.launch == "ray":
            return RayLauncher(on_exit, self._config.ray, engines_use_gpus())
        return LocalLauncher(on_exit, self._guard)

    async def _serve_unless_stopped(self, interruption: Interruption) -> int:
        """A signal at any stage ends that stage at once."""
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            interruption.noticed()
            if not serving.done():
                # While it serves, the API server has seen `stop` as well and says goodbye to its clients.
                timeout_s = _API_STOP_S if self._url.done() else 0
                await asyncio.wait((serving,), timeout=timeout_s)
            if serving.done():
                return serving.result()
            serving.cancel()
            await asyncio.wait((serving,), timeout=_API_STOP_S)
            return 0
        finally:
            stopped.cancel()

    async def _serve(self) -> int:
        with self._screen:
            with self._screen.stage("configuration"):
                machine = detect_machine()
                # Before the model is fetched: what is wrong without knowing it.
                facts = read_model_facts(self._config.model) if self._config.model is not None else None
                planned = check_config(self._config, machine, facts)
            with self._screen.stage("model"):
                is_fetched = self._config.model is None
                model = await self._model()
                if is_fetched:  # only now there is something to be read about it
                    facts = read_model_facts(model)
                    planned = check_config(self._config, machine, facts)
            with self._screen.stage("workers"):
                listening = self._listen()
                await self._start_workers(planned, machine, model, facts)
                await self._start_api_servers(model, listening, machine.environ)
                api = asyncio.create_task(self._run_api_server(model, listening), name="api-server")
                url = await self._until_ready(api)
        try:
            return await self._after_ready(url, api)
        finally:
            api.cancel()

    async def _model(self) -> str:
        name = self._config.served_model_name or self._config.model or EMBEDDED_MODEL_NAME
        if self._config.simulation.enabled and not self._config.served_model_name:
            name += SIMULATED_SUFFIX  # clients shall see it in every reply
        self._config = self._config.model_copy(update={"served_model_name": name})
        if self._config.model is None:
            return str(await ensure_embedded_model(self._screen.detail))
        return str(Path(self._config.model).expanduser()) if self._config.model.startswith("~") else self._config.model

    async def _start_workers(self, planned: Planned, machine: Machine, model: str, facts: ModelFacts | None) -> None:
        self._runtime_dir = directory = make_runtime_dir()
        self._guard.removes(directory)
        try:
            await self._guard.start()
        except OSError as error:
            raise ServeError(
                f"the watchdog, which ends workers if this process is killed, does not start: {error}"
            ) from error
        if isinstance(self._fleet.launcher, RayLauncher):
            node_ip = await self._fleet.launcher.connect(directory, self._screen.detail)
            self._config = reached_at(self._config, node_ip)
            machine = nodes_of_a_cluster(machine)
        try:
            self._config = with_trust(self._config, directory)
        except (KeyFileError, OSError) as error:
            raise ServeError(f"the sockets for workers cannot be made safe: {error}") from error
        config, environ = self._config, machine.environ

        def simulated(plans: Sequence[WorkerPlan]) -> list[WorkerCommand]:
            return simulated_commands(plans, config, model, facts, directory, environ)

        def real(plan: WorkerPlan) -> WorkerCommand:
            return worker_command(plan, config, model, directory, environ)

        if config.simulation.enabled:
            self._fleet.recruit_with(Recruiter(planned.planner, lambda plan: simulated([plan])[0]))
            commands = simulated(planned.workers)
            await self._fleet.start(commands)
            self._screen.detail(f"{len(planned.workers)} SIMULATED workers, processes: {len(commands)}; no engine runs")
            return
        self._fleet.recruit_with(Recruiter(planned.planner, real))
        commands = [real(plan) for plan in planned.workers]
        await self._fleet.start(commands)
        for command in commands:
            self._screen.worker_started(command.worker_id, self._log_of(command))

    def _log_of(self, command: WorkerCommand) -> Path:
        launcher = self._fleet.launcher
        return launcher.started_at(command.worker_id) if isinstance(launcher, RayLauncher) else command.log_path

    async def _start_api_servers(self, model: str, listening: socket.socket, environ: Mapping[str, str]) -> None:
        """Those besides the first one, which is here. They import vLLM while the workers load."""
        assert self._runtime_dir is not None
        environ = {**environ, **self._vllm_environment(model, environ)}
        commands = api_server_commands(self._config, model, self._runtime_dir, listening, environ)
        await self._fleet.start(commands)
        for command in commands:
            self._screen.worker_started(command.worker_id, command.log_path)

    def _vllm_environment(self, model: str, environ: Mapping[str, str]) -> dict[str, str]:
        """What vLLM and the hub's client read when an API server imports them; the operator's own values win."""
        wanted = {"VLLM_NO_USAGE_STATS": "1"}
        if not self._verbose:
            wanted["VLLM_LOGGING_LEVEL"] = "ERROR"
        if Path(model).is_dir():
            wanted["HF_HUB_OFFLINE"] = "1"
        return {name: value for name, value in wanted.items() if name not in environ}

    def _listen(self) -> socket.socket:
        try:
            return listening_socket(self._config.server)
        except ListenError as error:
            raise ServeError(str(error)) from error

    async def _run_api_server(self, model: str, listening: socket.socket) -> None:
        assert self._runtime_dir is not None
        os.environ.update(self._vllm_environment(model, os.environ))
        if not self._verbose:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says before it reads that
        if self._config.server.api_servers > 1:
            # Read by the Prometheus client when it is imported, which happens below.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_dir(self._runtime_dir))
        from proxy.api_server import run_api_server

        address = proxy_address(self._runtime_dir, self._config.security)
        await run_api_server(
            self._config,
            model,
            address,
            self._on_ready,
            self._exits,
            self._stop,
            on_join=self._screen.worker_ready,
            listening=listening,
            control=self._fleet,
            runtime_dir=self._runtime_dir,
        )

    async def _on_ready(self, url: str) -> None:
        if not self._url.done():
            self._fleet.serve()
            self._url.set_result(url)

    async def _until_ready(self, api: "asyncio.Task[None]") -> str:
        """The URL, when a request went through; raises `ServeError` when a worker or the API server fails first."""
        timeout_s = self._config.start_timeout_s
        waited_for = (self._url, self._lost_at_start, api)
        await asyncio.wait(waited_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._url.done():
            return self._url.result()
        if self._lost_at_start.done():
            raise ServeError(_with_log(self._lost_at_start.result()))
        if api.done():
            raise ServeError(self._api_failure(api))
        raise ServeError(
            f"the cluster was not ready within start_timeout_s={timeout_s:g}; the logs in {self._runtime_dir} tell "
            "what it was doing; raise start_timeout_s if it only needs longer"
        )

    async def _after_ready(self, url: str, api: "asyncio.Task[None]") -> int:
        name = self._config.served_model_name or self._config.model or EMBEDDED_MODEL_NAME
        key = next(iter(api_keys(self._config)), os.environ.get(API_KEY_VARIABLE, ""))
        show = asyncio.create_task(self._show(url, name, key), name="demonstration")
        try:
            await asyncio.wait((api, show), return_when=asyncio.FIRST_COMPLETED)
            if show.done() and (error := show.exception()) is not None:
                log.error("demonstration_failed", exc_info=error)
            await asyncio.wait((api,))
        finally:
            show.cancel()
        if self._stop.is_set():
            return 0
        raise ServeError(self._api_failure(api))

    async def _show(self, url: str, model: str, api_key: str) -> None:
        out = Console(highlight=False)
        if self._demo:
            try:
                await run_demo(url, model, api_key, out, self._config.server.options.get("ssl_certfile"))
            except DemoError as error:
                self._console.print(f"twinpool: the demonstration failed: {error}", style="red", markup=False)
        out.print(invitation(url, model, api_key), markup=False, soft_wrap=True)
        sys.stdout.flush()

    def _on_worker_down(self, down: WorkerDown) -> None:
        self._clean = self._clean and down.drained
        self._exits.put_nowait(down)
        if self._url.done():
            log_is = "" if down.drained else f"; its log is {down.exit.log_path}"
            text = f"twinpool: {down.cause}; {down.outlook.text}{log_is}"
            self._console.print(text, style="" if down.drained else "red", markup=False, soft_wrap=True)
        elif not self._lost_at_start.done():
            self._lost_at_start.set_result(down.exit)

    def _api_failure(self, api: "asyncio.Task[None]") -> str:
        error = None if api.cancelled() else api.exception()
        if error is None:
            return "the API server ended by itself; start it again, with --verbose for its log"
        if self._verbose:
            log.error("api_server_failed", exc_info=error)
        return f"the API server failed: {error or type(error).__name__}"

    def _fail(self, text: str, code: int) -> int:
        self._clean = False
        self._console.print(f"twinpool: {text}", style="red", markup=False, soft_wrap=True)
        return code

    async def _clean_up(self) -> None:
        try:
            # Workers that still load their model have nothing to finish.
            grace_s = (
                self._config.stop_timeout_s if self._url.done() else min(_START_GRACE_S, self._config.stop_timeout_s)
            )
            await self._fleet.stop(grace_s)
        except LaunchError as error:
            self._fail(str(error), EXIT_FAILED)
        await self._guard.dismiss()
        if self._runtime_dir is None:
            return
        if self._clean or self._stop.is_set():
            remove_runtime_dir(self._runtime_dir)
        else:
            keep_logs_only(self._runtime_dir)
            self._console.print(f"twinpool: the logs are in {self._runtime_dir}", markup=False, soft_wrap=True)


def _with_log(worker_exit: WorkerExit) -> str:
    lines = "\n".join(f"  | {line}" for line in worker_exit.last_lines)
    return f"{worker_exit.cause}. The end of {worker_exit.log_path}:\n{lines}"
