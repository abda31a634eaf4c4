"""The API server beside the dispatcher: it brings a cluster to its first clients, and shows and steers it.

Relies on vLLM 0.32: see `vllm_server`; a FastAPI application whose routes can still be put in front.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config import ClusterConfig
from cluster.messages import EngineFacts
from proxy.api_servers.vllm_hub import ApiServerHub
from proxy.dispatch.settings import DispatchSettings
from proxy.frontend.order_routes import add_order_routes, add_sleep_routes
from proxy.frontend.status_report import report
from proxy.frontend.vllm_core_client import ClusterClient
from proxy.frontend.vllm_self_test import SELF_TEST_TOKENS, generate_two, self_test
from proxy.frontend.vllm_server import ApiServerSeat, VllmServer
from proxy.health.cluster_health import ClusterHealth
from proxy.health.probes import probe_routes
from proxy.metrics import ProxyMetrics
from proxy.supervision import ProxyStartError
from proxy.workers.administration import Administration
from proxy.workers.sleeping import Sleeping
from proxy.workers.steering import Steering, scaling_rules
from proxy.workers.worker_pool import WorkerPool

log = logging.getLogger("twinpool.proxy")


class FirstServer(VllmServer):
    """Of several API servers the one that others ask about the cluster."""

    def __init__(
        self, config: ClusterConfig, model_path: str, listening: socket.socket, seat: ApiServerSeat | None = None
    ) -> None:
        """See `VllmServer`."""
        super().__init__(config, model_path, listening, seat)
        self._start_timeout_s, self._drain_timeout_s = config.start_timeout_s, config.drain_timeout_s
        self._liveness = config.liveness
        self._scaling = partial(scaling_rules, config) if config.autoscale.enabled else None

    async def serve(
        self,
        pool: WorkerPool,
        administration: Administration,
        settings: DispatchSettings,
        metrics: ProxyMetrics,
        supervised: Sequence["asyncio.Task[Any]"],
        on_ready: Callable[[str], Awaitable[None]],
        stop: asyncio.Event,
        hub: ApiServerHub | None = None,
    ) -> None:
        """Until `stop`; `hub` connects the further API server processes.

        Raises `RuntimeError` when one of `supervised` or the server itself ends before `stop`, `ProxyStartError` when
        it cannot start.
        """
        facts = engine_facts(pool)
        self.adopt(facts)
        client = ClusterClient(pool, settings, metrics, len(pool.roster.expected), self.returns_routed_experts)
        # Long enough to go through both pools.
        num_tokens = max(SELF_TEST_TOKENS, settings.policy.remote_prefill_min_tokens)
        serving = asyncio.Event()
        steers = self._steer(client, administration, metrics, serving)
        sleeping = Sleeping(pool, administration, client.dispatcher, self._drain_timeout_s)
        steers.append(asyncio.create_task(sleeping.run(), name="sleep"))
        supervised = (*supervised, *steers)
        health = ClusterHealth(pool, client.dispatcher, self._liveness, supervised, lambda: sleeping.state)
        readiness = health.readiness(partial(self._probe, num_tokens))
        if hub is not None:
            hub.open(client.dispatcher, pool, facts, len(pool.roster.expected), stop)

        def dress(app: FastAPI) -> FastAPI:
            self._add_routes(app, client, pool, administration, sleeping, hub)
            app.router.routes[:0] = probe_routes(health.faults, readiness, health.sleep)
            if hub is not None:
                hub.answer_with(app)
            return app

        async def start_up(llm: AsyncLLM) -> None:
            await self_test(llm, num_tokens)
            if hub is not None:
                missing = await hub.until_ready(self._start_timeout_s)
                if missing:
                    raise ProxyStartError(
                        f"{', '.join(missing)} did not come up within start_timeout_s; see their logs"
                    )
            log.info("serving url=%s", self.url)
            await on_ready(self.url)
            serving.set()

        try:
            await self.run(client, dress, start_up, supervised, stop)
        finally:
            readiness.close()
            for task in steers:
                task.cancel()

    def _steer(
        self, client: ClusterClient, administration: Administration, metrics: ProxyMetrics, serving: asyncio.Event
    ) -> list["asyncio.Task[None]"]:
        """Starts the autoscaler, if it is wanted and processes are ours."""
        resizing = administration.resizing
        if self._scaling is None or resizing is None:
            return []
        rules = self._scaling(resizing.control.devices)
        administration.steering = steering = Steering(client.dispatcher, administration, resizing, rules, metrics)
        return [asyncio.create_task(steering.run(serving), name="autoscaler")]

    def _add_routes(
        self,
        app: FastAPI,
        client: ClusterClient,
        pool: WorkerPool,
        administration: Administration,
        sleeping: Sleeping,
        hub: ApiServerHub | None,
    ) -> None:
        """The cluster's own routes. Further API server processes pass requests for them on to this one."""
        model = (self._args.served_model_name or [self._args.model])[0]

        @app.get("/twinpool/status")
        async def status() -> Response:
            others = hub.statuses(administration.notes()) if hub is not None else []
            body = msgspec.json.encode(report(model, pool, client.dispatcher, administration, others, sleeping.state))
            return Response(body, media_type="application/json")

        add_order_routes(app, administration, client.dispatcher.close)
        add_sleep_routes(app, sleeping)

    async def _probe(self, num_tokens: int) -> None:
        """One generation for `/ready`."""
        if self._llm is None or await generate_two(self._llm, num_tokens) != 2:
            raise RuntimeError("it did not give the two tokens asked for")


def engine_facts(pool: WorkerPool) -> EngineFacts:
    """What all engines together can do, as one: the shortest context, the sum of blocks."""
    engines = [worker.hello.engine for worker in pool.roster.alive()]
    return msgspec.structs.replace(
        pool.roster.alive("decode")[0].hello.engine,
        max_model_len=min(engine.max_model_len for engine in engines),
        num_blocks=sum(engine.num_blocks for engine in engines),
        supported_tasks=list(pool.supported_tasks()),
    )
