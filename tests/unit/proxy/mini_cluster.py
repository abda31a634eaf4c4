"""A cluster without engines or HTTP: fake workers, a real socket, `ClusterClient`, and vLLM's own output processor."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from cluster.config import LivenessConfig
from proxy.dispatch.settings import DispatchSettings
from proxy.flights.flight import Flight
from proxy.frontend.vllm_core_client import ClusterClient, FrontEndClient
from proxy.metrics import ProxyMetrics
from proxy.scheduling.place import Policy
from proxy.workers.roster import Roster
from proxy.workers.worker_pool import WorkerPool
from tests.unit.proxy.fake_worker import MODEL, Exchange, FakeWorker

PROMPT = list(range(100, 140))
DEAD_AFTER_S = 0.4


class MiniFrontEnd:
    """What `AsyncLLM` is to the API server, as far as requests and outputs go."""

    def __init__(self, client: FrontEndClient) -> None:
        self.core = client
        self.front_end = OutputProcessor(None, log_stats=False)
        client.bind(self.front_end)
        self.batches: list[Any] = []
        self._numbers = itertools.count()
        self._handler = asyncio.create_task(self._handle_outputs())

    async def _handle_outputs(self) -> None:
        while True:
            outputs = await self.core.get_output_async()
            self.batches.append(outputs)
            processed = self.front_end.process_outputs(outputs.outputs, outputs.timestamp, None)
            await self.core.abort_requests_async(processed.reqs_to_abort)

    @staticmethod
    def params(**values: Any) -> SamplingParams:
        defaults = {"max_tokens": 5, "temperature": 0.0, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        return SamplingParams(**{**defaults, **values})

    def request(self, prompt: list[int] | None = None, **values: Any) -> EngineCoreRequest:
        """A request as vLLM's input processor makes it."""
        number = next(self._numbers)
        return EngineCoreRequest(
            request_id=f"client-id-{number}",
            prompt_token_ids=list(prompt if prompt is not None else PROMPT),
            mm_features=None,
            sampling_params=self.params(**values),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id="client-id",
        )

    async def add(self, request: EngineCoreRequest) -> RequestOutputCollector:
        """Submits a request the way `AsyncLLM.add_request` does."""
        params = request.sampling_params
        assert params is not None
        collector = RequestOutputCollector(params.output_kind, request.request_id)
        if params.n == 1:
            self.front_end.add_request(request, None, None, 0, collector)
            await self.core.add_request_async(request)
            return collector
        parent = ParentRequest(request)
        children = []
        for index in range(params.n):
            child = request if index == params.n - 1 else copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            children.append(child)
            self.front_end.add_request(child, None, parent, index, collector)
        for child in children:
            await self.core.add_request_async(child)
        return collector

    async def run(self, prompt: list[int] | None = None, **values: Any) -> "Answer":
        """Submits a request and collects all of its answer."""
        return await read(await self.add(self.request(prompt, **values)))

    async def abort(self, request_id: str) -> None:
        """What `AsyncLLM.abort` does when a client leaves."""
        await self.core.abort_requests_async(self.front_end.abort_requests([request_id], internal=True))

    def assert_idle(self) -> None:
        """Nothing is left of any request in the front end."""
        assert self.front_end.request_states == {}
        assert self.front_end.parent_requests == {}
        assert self.front_end.external_req_ids == {}

    def end(self) -> None:
        self._handler.cancel()


class MiniCluster(MiniFrontEnd):
    """Workers, dispatcher, and the front end beside it."""

    def __init__(
        self, address: str, policy: Policy, reserve_at_start: bool, max_losses: int = 3, **more_settings: Any
    ) -> None:
        self.address = address
        self.exchange = Exchange()
        self.workers: dict[str, FakeWorker] = {}
        self.registry = CollectorRegistry()
        liveness = LivenessConfig(heartbeat_s=0.05, dead_after_s=DEAD_AFTER_S, proxy_lost_after_s=5)
        roster = Roster(frozenset({MODEL}), DEAD_AFTER_S, ("prefill-0", "decode-0"))
        metrics = ProxyMetrics(self.registry)
        self.pool = WorkerPool(address, roster, liveness, metrics)
        settings = DispatchSettings(policy, reserve_at_start, 0.5, 0.5, 0.1, max_losses, **more_settings)
        self.client = ClusterClient(self.pool, settings, metrics, num_engines=2)
        super().__init__(self.client)

    async def join(self, *worker_ids: str, **options: Any) -> None:
        """Starts workers and waits until the proxy knows them."""
        for worker_id in worker_ids:
            self.workers[worker_id] = await FakeWorker(worker_id, self.address, self.exchange, **options).start()
        for worker_id in worker_ids:
            await asyncio.wait_for(self.workers[worker_id].welcomed.wait(), 5)

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    def kill(self, *worker_ids: str) -> None:
        """Like SIGKILL, noticed at once."""
        for worker_id in worker_ids:
            self.workers[worker_id].freeze()
        for worker_id in worker_ids:
            self.pool.give_up(worker_id, f"Worker {worker_id} was killed by SIGKILL")

    async def restart(self, worker_id: str) -> None:
        """Kills a worker and starts it again; its new life is known when this returns."""
        self.kill(worker_id)
        await self.workers[worker_id].stop()
        await self.join(worker_id)

    @property
    def flight(self) -> Flight:
        """Of the only request."""
        (trip,) = self.client.dispatcher.trips.values()
        return trip.flight

    @property
    def sent(self) -> list[int]:
        """Tokens that the only client has got."""
        (trip,) = self.client.dispatcher.trips.values()
        return trip.sent or []

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"twinpool_{name}", labels) or 0.0

    def assert_idle(self) -> None:
        """Nothing is left of any request, in the proxy or in the front end."""
        assert self.client.dispatcher.trips == {}
        assert len(self.client.dispatcher.legs) == 0
        assert len(self.client.dispatcher.siblings) == 0
        scheduler = self.client.dispatcher.scheduler
        assert scheduler.num_waiting == 0
        assert scheduler.books.held == {}
        for decode in scheduler.books.pools.decode.values():
            assert (decode.reserved, decode.num_requests, decode.num_running, decode.local_prefills) == (0, 0, 0, 0)
        assert not any(prefill.jobs for prefill in scheduler.books.pools.prefill.values())
        super().assert_idle()

    async def close(self) -> None:
        self.end()
        for worker in self.workers.values():
            await worker.stop()
        self.pool.close()


class Answer:
    """Everything a client got."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, str | None] = {}
        self.stop_reasons: dict[int, Any] = {}
        self.num_logprobs: dict[int, int] = {}
        self.outputs: list[RequestOutput] = []

    def take(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        for choice in output.outputs:
            self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
            self.num_logprobs[choice.index] = self.num_logprobs.get(choice.index, 0) + len(choice.logprobs or [])
            if choice.finish_reason is not None:
                assert self.finish_reasons.get(choice.index) is None, "a choice ends once"
                self.finish_reasons[choice.index] = choice.finish_reason
                self.stop_reasons[choice.index] = choice.stop_reason

    @property
    def cached_tokens(self) -> int | None:
        count: int | None = self.outputs[-1].num_cached_tokens
        return count


async def read(collector: RequestOutputCollector, timeout_s: float = 5.0) -> Answer:
    """Reads an answer to its end; raises what the client would be told."""
    answer = Answer()
    async with asyncio.timeout(timeout_s):
        while True:
            output = collector.get_nowait() or await collector.get()
            assert isinstance(output, RequestOutput)
            answer.take(output)
            if output.finished:
                return answer


async def failure(cluster: MiniCluster, collector: RequestOutputCollector) -> GracefulHTTPError:
    """What the client of a request that fails is told; nothing of it is left."""
    with pytest.raises(GracefulHTTPError) as caught:
        await read(collector)
    cluster.assert_idle()
    return caught.value


async def until(condition: Callable[[], Any], timeout_s: float = 3.0) -> None:
    """Waits until `condition()` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def mini_cluster(
    tmp_path: Path,
    *worker_ids: str,
    on_no_prefill: Any = "local",
    reserve_at_start: bool = True,
    prefill_from: int = 4,
    max_losses: int = 3,
    max_queued_requests: int = 1000,
    **more_settings: Any,
) -> AsyncIterator[MiniCluster]:
    """A cluster with these workers, by default one of each role."""
    policy = Policy(prefill_from, on_no_prefill, max_queued_requests)
    cluster = MiniCluster(f"ipc://{tmp_path}/proxy", policy, reserve_at_start, max_losses, **more_settings)
    try:
        await cluster.join(*(worker_ids or ("prefill-0", "decode-0")))
        yield cluster
    finally:
        await cluster.close()
