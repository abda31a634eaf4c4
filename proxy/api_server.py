"""Puts the proxy of a cluster together: the pool of workers, the API server, the further ones; and takes it apart.

Nothing here imports vLLM before that is needed: it takes seconds, which the launcher spends on starting workers.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from cluster.config import ClusterConfig
from cluster.trust import KeyFileError, cluster_key
from proxy.api_servers.accept_loads import open_loads
from proxy.api_servers.settings import ROLE as API_SERVER
from proxy.api_servers.settings import api_server_names, hub_address, loads_path
from proxy.dispatch.settings import dispatch_settings
from proxy.listening import ListenError, listening_socket
from proxy.metrics import ProxyMetrics
from proxy.supervision import ProxyStartError, unless_stopped
from proxy.workers.administration import Administration
from proxy.workers.arrival import expected_workers, wait_for_workers
from proxy.workers.rolling_restart import RollingTimes, WorkerControl
from proxy.workers.roster import Roster
from proxy.workers.worker_pool import WorkerPool
from proxy.workers.worker_socket import SocketAddressError

log = logging.getLogger("twinpool.proxy")


class WorkerGone(Protocol):
    """What the launcher tells about a worker's process that ended."""

    @property
    def worker_id(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def drained(self) -> bool: ...
    @property
    def returns(self) -> bool: ...


async def run_api_server(
    config: ClusterConfig,
    model_path: str,
    proxy_address: str,
    on_ready: Callable[[str], Awaitable[None]],
    worker_exits: "asyncio.Queue[Any]",
    stop: asyncio.Event,
    on_join: Callable[[str], None] = lambda _worker_id: None,
    listening: socket.socket | None = None,
    control: WorkerControl | None = None,
    runtime_dir: Path | None = None,
) -> None:
    """Serves until `stop` is set.

    Args:
        config: the whole configuration.
        model_path: directory or name of the model, as the workers were told.
        proxy_address: ZMQ endpoint to bind for the workers.
        on_ready: awaited with the server's URL once a real request went through both pools.
        worker_exits: `WorkerGone` objects of processes that ended.
        stop: ends the server; open requests get an error.
        on_join: called with the id of every worker that joins while the others are waited for.
        listening: the bound socket to serve on; without one it is made from `config.server`.
        control: starts worker processes again; without one that is not possible.
        runtime_dir: where further API server processes are connected (`server.api_servers`).

    Raises `ProxyStartError`, and `RuntimeError` when the proxy fails while serving.
    """
    # vLLM takes seconds to import; the launcher's event loop goes on meanwhile.
    abandoned = threading.Event()
    try:
        bound = listening or listening_socket(config.server)
    except ListenError as error:
        raise ProxyStartError(str(error)) from error
    server = await unless_stopped(asyncio.to_thread(_prepare, config, model_path, bound, runtime_dir, abandoned), stop)
    if server is None:
        abandoned.set()
        return
    if stop.is_set():
        server.close()
        return
    metrics = ProxyMetrics()
    pool = exits = administration = hub = None
    try:
        if runtime_dir is not None and config.server.api_servers > 1:

            def on_api_server(name: str) -> None:
                on_join(name)
                if control is not None:
                    control.joined(name, API_SERVER)

            hub = _hub(config, runtime_dir, metrics, on_api_server, server.returns_routed_experts)
        key = cluster_key(config)
        roster = Roster(server.model_names, config.liveness.dead_after_s, expected_workers(config))
        roster.restarts = control is not None and config.restart != "never"
        joined = control.joined if control is not None else _nobody
        pool = WorkerPool(proxy_address, roster, config.liveness, metrics, joined, key)
        times = RollingTimes(config.drain_timeout_s, config.start_timeout_s, config.stop_timeout_s)
        administration = Administration(pool, control, times)
        exits = asyncio.create_task(_watch_exits(worker_exits, pool, hub), name="worker-exits")
        supervised = (exits, *pool.tasks, *(hub.tasks if hub is not None else ()))
        ready = await unless_stopped(wait_for_workers(pool, config.start_timeout_s, on_join), stop, supervised)
        if ready is not None:
            settings = dispatch_settings(config, server.on_gpu, server.asks_for_key)
            await server.serve(pool, administration, settings, metrics, supervised, on_ready, stop, hub)
    except (SocketAddressError, KeyFileError) as error:
        raise ProxyStartError(str(error)) from error
    finally:
        if exits is not None:
            exits.cancel()
        if administration is not None:
            administration.close()
        if hub is not None:
            hub.close()
        if pool is not None:
            pool.close()
        server.close()
        metrics.unregister()


def _nobody(_worker_id: str, _role: str) -> None:
    """Where processes are somebody else's, nobody needs to know who joins."""


def _prepare(
    config: ClusterConfig,
    model_path: str,
    listening: socket.socket,
    runtime_dir: Path | None,
    abandoned: threading.Event,
) -> Any:
    from proxy.frontend.vllm_first_server import FirstServer
    from proxy.frontend.vllm_server import ApiServerSeat

    seat = None
    try:
        if runtime_dir is not None and config.server.api_servers > 1:
            seat = ApiServerSeat(0, config.server.api_servers, open_loads(loads_path(runtime_dir)))
        server = FirstServer(config, model_path, listening, seat)
    except BaseException:
        listening.close()  # whoever waits for this thread may be gone
        raise
    if abandoned.is_set():
        # Nobody waits for it any more; a thread cannot be cancelled.
        server.close()
    return server


def _hub(
    config: ClusterConfig,
    runtime_dir: Path,
    metrics: ProxyMetrics,
    on_ready: Callable[[str], None],
    returns_routed_experts: bool,
) -> Any:
    from proxy.api_servers.vllm_hub import ApiServerHub

    names, loads = api_server_names(config), open_loads(loads_path(runtime_dir))
    return ApiServerHub(
        hub_address(runtime_dir), names, loads, config.liveness, metrics, on_ready, returns_routed_experts
    )


async def _watch_exits(worker_exits: "asyncio.Queue[WorkerGone]", pool: WorkerPool, hub: Any) -> None:
    while True:
        gone = await worker_exits.get()
        if hub is not None and gone.worker_id in hub.names:
            hub.gone(gone.worker_id, gone.cause)
            continue
        cause = gone.cause[:1].upper() + gone.cause[1:]
        pool.give_up(gone.worker_id, cause, drained=gone.drained, returns=gone.returns)
