"""The API server of a cluster: vLLM's own, on our core client, with our routes and metrics.

Relies on vLLM 0.32: `setup_server`, `build_app`, `init_app_state`, `NoSignalServer` (signals belong to whoever runs
us), `AsyncLLM.from_vllm_config`.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.config import ClusterConfig
from cluster.trust import KeyFileError, cluster_key
from proxy.api_servers.accept_loads import open_loads
from proxy.api_servers.settings import ROLE as API_SERVER
from proxy.api_servers.settings import api_server_names, hub_address, loads_path
from proxy.dispatch_settings import dispatch_settings
from proxy.listening import ListenError, listening_socket
from proxy.metrics import ProxyMetrics
from proxy.workers.administration import Administration
from proxy.workers.rolling_restart import RollingTimes, WorkerControl
from proxy.workers.roster import Roster
from proxy.workers.worker_pool import WorkerPool
from proxy.workers.worker_socket import SocketAddressError

log = logging.getLogger("twinpool.proxy")


class ProxyStartError(Exception):
    """The proxy could not start; a sentence for the operator."""


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
        if control is None:
            pool = WorkerPool(proxy_address, roster, config.liveness, metrics, key=key)
        else:
            roster.restarts = config.restart != "never"
            pool = WorkerPool(proxy_address, roster, config.liveness, metrics, control.joined, key)
        times = RollingTimes(config.drain_timeout_s, config.start_timeout_s, config.stop_timeout_s)
        administration = Administration(pool, control, times)
        exits = asyncio.create_task(_watch_exits(worker_exits, pool, hub), name="worker-exits")
        ready = await unless_stopped(wait_for_workers(pool, config.start_timeout_s, on_join), stop)
        if ready is not None:
            supervised = (exits, *pool.tasks, *(hub.tasks if hub is not None else ()))
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


def _prepare(
    config: ClusterConfig,
    model_path: str,
    listening: socket.socket,
    runtime_dir: Path | None,
    abandoned: threading.Event,
) -> Any:
    from proxy.frontend.vllm_server import ApiServerSeat, VllmServer

    seat = None
    try:
        if runtime_dir is not None and config.server.api_servers > 1:
            seat = ApiServerSeat(0, config.server.api_servers, open_loads(loads_path(runtime_dir)))
        server = VllmServer(config, model_path, listening, seat)
    except BaseException:
        listening.close()  # whoever waits for this thread may be gone
        raise
    if abandoned.is_set():
        # Nobody waits for it any more; a thread cannot be cancelled.
        server.close()
    return server


async def unless_stopped(work: Awaitable[Any], stop: asyncio.Event) -> Any:
    """The result of `work`, or None if `stop` came first."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done() and not task.done():
            task.cancel()
            return None
        return task.result()
    finally:
        stopped.cancel()


def expected_workers(config: ClusterConfig) -> tuple[str, ...]:
    """Ids of all workers of the configuration, in the order of their indices."""
    return tuple(
        f"{role}-{index}"
        for role, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode))
        for index in range(pool.replicas)
    )


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


async def wait_for_workers(
    pool: WorkerPool, timeout_s: float, on_join: Callable[[str], None] = lambda _worker_id: None
) -> bool:
    """Returns when a prefill and a decode worker that can exchange blocks are there; raises `ProxyStartError`.

    A cluster without prefill workers in its configuration only waits for a decode worker.
    """
    deadline_s = time.monotonic() + timeout_s
    roster = pool.roster
    joined: set[str] = set()
    while True:
        for worker_id in sorted(roster.workers.keys() - joined):
            joined.add(worker_id)
            on_join(worker_id)
        needs_prefill = any(worker_id.startswith("prefill-") for worker_id in roster.expected)
        if needs_prefill and roster.has_pair():
            return True
        if not needs_prefill and roster.alive("decode"):
            return True
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or _hopeless(roster):
            raise ProxyStartError(_who_is_missing(roster, timeout_s))
        await pool.wait_for_change(min(left_s, 1.0))


def _hopeless(roster: Roster) -> bool:
    """All workers of a role are dead, or everybody has come and still no pair can exchange blocks."""
    if all(worker_id in roster.workers or worker_id in roster.causes for worker_id in roster.expected):
        return True
    by_role: dict[str, list[str]] = {}
    for worker_id in roster.expected:
        by_role.setdefault(worker_id.rpartition("-")[0], []).append(worker_id)
    return any(all(worker_id in roster.causes for worker_id in pool) for pool in by_role.values())


def _who_is_missing(roster: Roster, timeout_s: float) -> str:
    refused = roster.refused_pairs()
    if refused and not roster.has_pair():
        return (
            "no prefill worker has a KV layout that fits a decode worker, so nothing could be handed over; they differ "
            f"in (prefill / decode): {', '.join(refused[0].differing_fields)}. Give both pools the same engine options"
        )
    missing = [worker_id for worker_id in roster.expected if worker_id not in roster.workers]
    dead = [f"{worker_id}: {cause}" for worker_id, cause in roster.causes.items()]
    late = [worker_id for worker_id in missing if worker_id not in roster.causes]
    parts = []
    if dead:
        parts.append("; ".join(dead))
    if late:
        parts.append(f"{', '.join(late)} did not come up within {timeout_s:g} s (start_timeout_s); see their logs")
    return "the cluster did not start: " + ("; ".join(parts) or "no worker came up; see their logs")


def first_failure(tasks: Sequence["asyncio.Task[Any]"]) -> str:
    """Why a task that must not end did."""
    for task in tasks:
        if task.done():
            error = None if task.cancelled() else task.exception()
            return f"the proxy's task {task.get_name()} ended: {error or 'cancelled'}"
    return "a task of the proxy ended"
