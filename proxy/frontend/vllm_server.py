"""vLLM's API server around the cluster: configuration, `AsyncLLM`, application, HTTP.

Relies on vLLM 0.32: see `vllm_core_client` and `vllm_arguments`; `AsyncLLM.from_vllm_config`; from
`vllm.entrypoints.launchers` `build_app`, `init_app_state` and `NoSignalServer` (signals belong to whoever runs us),
whose `peer_loads` leave a connection to the process that has fewest;
`app.state.openai_serving_models`; `AsyncEngineArgs._api_process_count` and `_api_process_rank`; a FastAPI application
whose middlewares can still be changed; `AuthenticationMiddleware.verify_token`, and that its keys are `args.api_key`
or else `VLLM_API_KEY`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from huggingface_hub import snapshot_download
from starlette.types import ASGIApp
from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import set_ulimit
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config import ClusterConfig
from cluster.messages import EngineFacts
from proxy.adapters.vllm_adapters import drop_unguarded_routes
from proxy.frontend.front_end_metrics import FrontEndMetrics
from proxy.frontend.vllm_arguments import ServerOptionError, server_arguments
from proxy.frontend.vllm_core_client import FrontEndClient, in_place_of_engine
from proxy.frontend.vllm_unknown_route import name_the_routes
from proxy.middleware.key_guard import ask_for_key
from proxy.middleware.request_standing import find_standings
from proxy.slo.rules import SloRules
from proxy.supervision import ProxyStartError, first_failure

log = logging.getLogger("twinpool.proxy")

STREAMS_END_WITHIN_S = 3


@dataclass(frozen=True, slots=True)
class ApiServerSeat:
    """The place of one API server process among several that accept on one socket."""

    index: int
    count: int
    loads: memoryview
    """Connections of each (`proxy.api_servers.accept_loads`)."""


class _HttpServer(NoSignalServer):  # type: ignore[misc]  # vLLM is not typed for us
    """Tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config, seat: ApiServerSeat | None) -> None:
        super().__init__(config, (seat.loads, seat.index) if seat is not None else None)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class VllmServer:
    """Of one process. Made before the workers are up; serves, on a bound socket, when they are."""

    def __init__(
        self, config: ClusterConfig, model_path: str, listening: socket.socket, seat: ApiServerSeat | None = None
    ) -> None:
        """Raises `ProxyStartError`. Takes seconds; may run in a thread. Owns the socket from here on.

        `seat` is None where no other process accepts on the socket.
        """
        self._socket = listening
        self._seat = seat
        try:
            self._configure(config, model_path)
        except ProxyStartError:
            listening.close()
            raise
        self._llm: AsyncLLM | None = None
        self._metrics: FrontEndMetrics | None = None

    def _configure(self, config: ClusterConfig, model_path: str) -> None:
        if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise ProxyStartError(
                "VLLM_ALLOW_INSECURE_SERIALIZATION is set, which puts pickle on the sockets between workers and proxy; "
                "unset it"
            )
        try:
            self._args, self._engine_args = server_arguments(config, model_path)
        except ServerOptionError as error:
            raise ProxyStartError(str(error)) from error
        self._slo = SloRules(config.slo)
        if self._seat is not None:
            if self._seat.index:
                # It is told the adapters; these may have been removed since the cluster was started.
                self._args.lora_modules = None
            # No cache of images that engines are expected to mirror: each process would have its own.
            self._engine_args._api_process_count = self._seat.count
            self._engine_args._api_process_rank = self._seat.index
        set_ulimit()
        try:
            self.config: VllmConfig = self._engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        except Exception as error:  # whatever vLLM's checks raise, it is about the options
            raise ProxyStartError(f"vLLM refuses the model or the engine options: {error}") from error
        self.model_names = _names_of(model_path) | {str(self.config.model_config.model)}

    @property
    def url(self) -> str:
        """Where clients on this machine find the server."""
        if self._args.uds:
            return f"unix:{self._args.uds}"
        scheme = "https" if self._args.ssl_keyfile and self._args.ssl_certfile else "http"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._args.host, self._args.host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._args.port}"

    @property
    def asks_for_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self._keys)

    @property
    def _keys(self) -> list[str]:
        return [key for key in (self._args.api_key or [envs.VLLM_API_KEY]) if key]

    @property
    def on_gpu(self) -> bool:
        """Whether the workers' devices are GPUs (as this machine sees them)."""
        return bool(current_platform.is_cuda_alike())

    @property
    def returns_routed_experts(self) -> bool:
        """Whether engines send with an output which experts computed the request."""
        return bool(getattr(self.config.model_config, "enable_return_routed_experts", False))

    def adopt(self, facts: EngineFacts) -> None:
        """What the engines settled on replaces what this process guessed."""
        self.config.model_config.max_model_len = facts.max_model_len
        self.config.cache_config.block_size = facts.block_size
        self.config.cache_config.num_gpu_blocks = facts.num_blocks

    async def run(
        self,
        client: FrontEndClient,
        dress: Callable[[FastAPI], ASGIApp],
        start_up: Callable[[AsyncLLM], Coroutine[Any, Any, None]],
        supervised: Sequence["asyncio.Task[Any]"],
        stop: asyncio.Event,
    ) -> None:
        """The server on a core client, until `stop`.

        Args:
            client: the cluster, as vLLM sees it.
            dress: adds to vLLM's application what is ours, and returns what is served.
            start_up: awaited when HTTP is up; the server ends if it fails.
            supervised: tasks that must not end.
            stop: ends the server; open requests get an error.

        Raises `RuntimeError` when one of `supervised` or the server itself ends before `stop`.
        """
        with in_place_of_engine(client):
            self._llm = llm = AsyncLLM.from_vllm_config(
                vllm_config=self.config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=self._engine_args.enable_log_requests,
                aggregate_engine_logging=self._engine_args.aggregate_engine_logging,
                disable_log_stats=self._engine_args.disable_log_stats,
            )
        client.bind(llm.output_processor)
        http = await self._http_server(llm, client, dress)
        serving = asyncio.create_task(http.serve(sockets=[self._socket]), name="http-server")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        handler = llm.output_handler
        watched = [*supervised, serving, *([handler] if handler is not None else [])]
        try:
            await _start_up(http, start_up(llm), [*watched, stopping])
            await asyncio.wait([*watched, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                cause = first_failure(watched)
                log.error("proxy_failed cause=%s", cause)
                client.die(cause)
                raise RuntimeError(cause)
        finally:
            client.end_all(503, "The server is shutting down")
            stopping.cancel()
            await _end_http(http, serving)

    async def _http_server(
        self, llm: AsyncLLM, client: FrontEndClient, dress: Callable[[FastAPI], ASGIApp]
    ) -> _HttpServer:
        args = self._args
        tasks = await llm.get_supported_tasks()
        app: FastAPI = build_app(args, tasks, llm.model_config)
        drop_unguarded_routes(app)
        find_standings(app, self._slo)
        self._metrics = FrontEndMetrics()
        if keys := self._keys:
            ask_for_key(app, AuthenticationMiddleware(app, keys).verify_token, self._metrics.without_key.inc)
        name_the_routes(app)
        await init_app_state(llm, app.state, args, tasks)
        client.serve_adapters(app.state.openai_serving_models)
        options: dict[str, Any] = {}
        log_config = get_uvicorn_log_config(args)
        if log_config is not None:
            options["log_config"] = log_config
        config: Any = uvicorn.Config(
            dress(app),
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            timeout_graceful_shutdown=STREAMS_END_WITHIN_S,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            **({"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}),
            **options,
        )
        config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
        config.h11_max_header_count = args.h11_max_header_count
        config.load()
        server = _HttpServer(config, self._seat)
        app.state.server = server
        return server

    def close(self) -> None:
        """Gives back the port and vLLM's threads."""
        self._socket.close()
        if self._metrics is not None:
            self._metrics.unregister()
            self._metrics = None
        if self._llm is not None:
            self._llm.shutdown(timeout=0)
            self._llm = None


def _names_of(model_path: str) -> frozenset[str]:
    """How workers may call the model: offline, vLLM replaces a hub name with the directory of its snapshot."""
    names = {model_path, str(Path(model_path).expanduser().absolute())}
    if not Path(model_path).exists():
        try:
            names.add(str(snapshot_download(model_path, local_files_only=True, ignore_patterns="*")))
        except (OSError, ValueError) as error:
            # Not in the cache: then workers use the name too.
            log.debug("model_not_cached model=%s error=%s", model_path, error)
    return frozenset(names)


async def _start_up(http: _HttpServer, work: Coroutine[Any, Any, None], ends: Sequence["asyncio.Task[Any]"]) -> None:
    """Carries out `work` when HTTP is up, unless one of `ends` ends first. Raises what `work` raises."""

    async def when_up() -> None:
        try:
            await http.is_up.wait()
        except asyncio.CancelledError:
            work.close()
            raise
        await work

    starting = asyncio.create_task(when_up(), name="start-up")
    await asyncio.wait((starting, *ends), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
    else:
        starting.cancel()


async def _end_http(http: uvicorn.Server, serving: "asyncio.Task[None]") -> None:
    http.should_exit = True
    done, _ = await asyncio.wait((serving,), timeout=STREAMS_END_WITHIN_S + 2)
    if not done:
        http.force_exit = True
        serving.cancel()
        await asyncio.wait((serving,), timeout=2)
