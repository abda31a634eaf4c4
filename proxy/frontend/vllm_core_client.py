"""vLLM's `AsyncLLM` on top of a cluster: the core client that it talks to instead of an engine process.

Internals of vLLM 0.32.0 this relies on, checked by `tests/unit/proxy/test_vllm_core_client.py`:
`EngineCoreClient` and what `AsyncLLM` calls on it; `EngineCoreClient.make_async_mp_client`, called once by
`AsyncLLM.__init__`; `OutputProcessor.{request_states, has_request, abort_requests}`, `RequestState.{queue,
parent_req}`, `RequestOutputCollector.put(exception)`, which `generate()` raises to its caller; `AsyncLLM` aborts what
ended at a stop string from the task that reads outputs. For adapters see `proxy.adapters.vllm_adapters`.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor

from proxy.adapters.adapter import Adapter
from proxy.adapters.vllm_adapters import adapter_of, settle, show, unload_through
from proxy.dispatch.dispatcher import Dispatcher
from proxy.dispatch.settings import DispatchSettings
from proxy.legs.vllm_leg_requests import ClientTransferParams, describe
from proxy.metrics import ProxyMetrics
from proxy.middleware.request_context import CURRENT, PriorityOutOfRange, RequestContext, current_standing
from proxy.scheduling.view import RequestShape
from proxy.workers.engine_calls import UtilityError
from proxy.workers.worker_pool import WorkerPool


class ClientResources:
    """What `AsyncLLM.errored` looks at."""

    def __init__(self) -> None:
        self.engine_dead = False


class FrontEndClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is not typed for us
    """The whole cluster as one engine core, wherever its dispatcher is. Call `bind` before the first request."""

    def __init__(self, num_engines: int, returns_routed_experts: bool = False) -> None:
        self.resources = ClientResources()
        self.engine_ranks_managed = list(range(num_engines))
        self._num_engines = num_engines
        self._returns_routed_experts = returns_routed_experts
        self._front_end: OutputProcessor | None = None
        self._reader: asyncio.Task[Any] | None = None
        # A context lives as long as its HTTP request; nobody else keeps it.
        self._contexts: WeakValueDictionary[str, RequestContext] = WeakValueDictionary()
        self._models: Any = None
        self._adapters: Sequence[Adapter] = ()

    def bind(self, front_end: OutputProcessor) -> None:
        """Names the front end, whose requests are told about failures."""
        self._front_end = front_end

    # ------------------------------------------------------------------------------------------- the dispatcher

    @property
    @abstractmethod
    def _outputs(self) -> "asyncio.Queue[Any]":
        """`EngineCoreOutputs` for this front end, or the exception that ends it."""

    @abstractmethod
    def _submit(self, request: EngineCoreRequest, shape: RequestShape, group: str, choices: int) -> None:
        """Hands a request to the dispatcher; `group` names its siblings, if it is one of several `choices`."""

    @abstractmethod
    def _abort(self, request_ids: Iterable[str], *, answered: bool) -> None:
        """Ends requests on every worker; `answered`: their clients have all they asked for."""

    @abstractmethod
    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every living worker's engine; raises `GracefulHTTPError` (503)."""

    @abstractmethod
    async def _load_adapter(self, adapter: Adapter, *, again: bool) -> Adapter:
        """Loads an adapter into every worker, and returns it as they know it; raises `GracefulHTTPError` (503)."""

    @abstractmethod
    def end_all(self, status: int, message: str) -> None:
        """Ends every request of this front end with an error."""

    # ----------------------------------------------------------------------------------------------- requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Takes a request; raises `VLLMValidationError` (400) for `kv_transfer_params` or such a `priority`."""
        if request.abort_immediately:
            # vLLM's way to free blocks held for a hand-over between its own servers; ours have other owners.
            return
        if self._front_end is None:
            raise RuntimeError("bind was not called on the core client: requests have no front end to answer to")
        if not self._front_end.has_request(request.request_id):
            # A sibling failed while the children of an `n > 1` request were being added.
            return
        try:
            shape = describe(request, self._returns_routed_experts)
        except ClientTransferParams as error:
            self._withdraw(request.request_id)
            raise VLLMValidationError(str(error), parameter="kv_transfer_params") from error
        try:
            shape = replace(shape, standing=current_standing(request.priority))
        except PriorityOutOfRange as error:
            self._withdraw(request.request_id)
            raise VLLMValidationError(str(error), parameter="priority") from error
        context = CURRENT.get()
        if context is not None:
            self._contexts[request.request_id] = context
        parent = self._front_end.request_states[request.request_id].parent_req
        self._submit(request, shape, *((parent.request_id, parent.n) if parent is not None else ("", 1)))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Ends requests on every worker."""
        # Who reads outputs aborts what it has found a stop string in; everybody else, what clients have left.
        self._abort(request_ids, answered=asyncio.current_task() is self._reader)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs of one engine step of one worker."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.current_task()
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        if outputs.engine_index >= self._num_engines:
            # A worker beyond those configured: vLLM has no metrics for it.
            outputs.engine_index, outputs.scheduler_stats = 0, None
        return outputs

    def tell_client(
        self, request_id: str, status: int, message: str, retry_after_s: float | None = None
    ) -> Iterable[str]:
        """Ends a request and its siblings in the front end with an error; returns the ids of all of them."""
        state = self._front_end.request_states.get(request_id) if self._front_end is not None else None
        if state is None:
            return ()
        queue = state.queue
        ids = self._withdraw(request_id)
        context = self._contexts.get(request_id)
        if context is not None:
            context.retry_after_s = retry_after_s
        if queue is not None:
            # After the withdrawal, which leaves an `abort` output in the queue that this replaces.
            queue.put(GracefulHTTPError(message, HTTPStatus(status)))
        return ids

    def _withdraw(self, request_id: str) -> list[str]:
        if self._front_end is None:
            return []
        state = self._front_end.request_states.get(request_id)
        if state is None:
            return []
        parent = state.parent_req
        ids: list[str] = self._front_end.abort_requests(
            [parent.request_id if parent is not None else request_id], internal=True
        )
        return ids

    def die(self, cause: str) -> None:
        """The cluster is out of reach for good: every request fails and vLLM's watchdog ends the server."""
        self.end_all(503, cause)
        self.resources.engine_dead = True
        self._outputs.put_nowait(EngineDeadError())

    def shutdown(self, timeout: float | None = None) -> None:
        """Called by `AsyncLLM.shutdown`; workers are stopped by whoever started them."""
        self.resources.engine_dead = True

    # ----------------------------------------------------------------------------------------------- adapters

    def serve_adapters(self, models: Any) -> None:
        """Keeps vLLM's `OpenAIServingModels` equal to what the cluster has."""
        self._models = models
        show(models, self._adapters)

    def _show_adapters(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters
        if self._models is not None:
            show(self._models, adapters)

    # ------------------------------------------------------------------------------------ calls for every engine

    async def profile_async(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        await self._call_all("profile", is_start, profile_prefix, delay_iterations, max_iterations)

    async def reset_mm_cache_async(self) -> None:
        await self._call_all("reset_mm_cache")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return all(await self._call_all("reset_prefix_cache", reset_running_requests, reset_connector))

    async def reset_encoder_cache_async(self) -> None:
        await self._call_all("reset_encoder_cache")

    async def sleep_async(self, level: int = 1, mode: Any = "abort") -> None:
        raise UtilityError("workers sleep together and when nothing is open: POST /twinpool/sleep")

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        raise UtilityError("workers wake together: POST /twinpool/wake")

    async def is_sleeping_async(self) -> bool:
        return any(await self._call_all("is_sleeping"))

    async def is_scheduler_paused_async(self) -> bool:
        return False

    async def add_lora_async(self, lora_request: Any) -> bool:
        settle(lora_request, await self._load_adapter(adapter_of(lora_request), again=lora_request.load_inplace))
        return True

    async def remove_lora_async(self, lora_id: int) -> bool:
        return all(await self._call_all("remove_lora", lora_id))

    async def list_loras_async(self) -> set[int]:
        return set.intersection(*(set(ids) for ids in await self._call_all("list_loras")))

    async def pin_lora_async(self, lora_id: int) -> bool:
        return all(await self._call_all("pin_lora", lora_id))

    # ------------------------------------------------------------------------------- what one engine could do

    async def pause_scheduler_async(self, mode: Any = "abort", clear_cache: bool = True) -> None:
        _not_on_a_cluster("pausing generation")

    async def resume_scheduler_async(self) -> None:
        _not_on_a_cluster("resuming generation")

    async def collective_rpc_async(self, method: Any, *_args: Any, **_kwargs: Any) -> list[Any]:
        _not_on_a_cluster("collective_rpc")

    async def release_kv_cache_memory_async(self) -> None:
        _not_on_a_cluster("releasing KV cache memory")

    async def compute_weight_checksums_async(self) -> list[dict[str, str]]:
        _not_on_a_cluster("computing weight checksums")

    async def set_weight_version_async(self, weight_version: str) -> None:
        _not_on_a_cluster("changing weights")

    async def get_weight_version_async(self) -> str:
        _not_on_a_cluster("weight versions")

    async def prepare_elastic_ep(self, new_data_parallel_size: int) -> None:
        _not_on_a_cluster("elastic expert parallelism")

    async def commit_elastic_ep(self) -> None:
        _not_on_a_cluster("elastic expert parallelism")

    async def get_status(self) -> dict[str, Any]:
        _not_on_a_cluster("the state of single engines")

    async def handle_fault(self, fault_tolerance_request: Any) -> Any:
        _not_on_a_cluster("fault instructions")


class ClusterClient(FrontEndClient):
    """The client beside the dispatcher, in one process with it."""

    def __init__(
        self,
        pool: WorkerPool,
        settings: DispatchSettings,
        metrics: ProxyMetrics,
        num_engines: int,
        returns_routed_experts: bool = False,
    ) -> None:
        super().__init__(num_engines, returns_routed_experts)
        self.dispatcher = Dispatcher(pool, settings, metrics, self.tell_client)
        self._pool = pool
        pool.adapters.announce_to(self._take_adapters)

    @property
    def _outputs(self) -> "asyncio.Queue[Any]":
        return self.dispatcher.outputs

    def _submit(self, request: EngineCoreRequest, shape: RequestShape, group: str, choices: int) -> None:
        self.dispatcher.add(request.request_id, request, shape, group, choices)

    def _abort(self, request_ids: Iterable[str], *, answered: bool) -> None:
        self.dispatcher.abort(request_ids, answered=answered)

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        try:
            return list((await self._pool.call_all(method, *args)).values())
        except UtilityError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    async def _load_adapter(self, adapter: Adapter, *, again: bool) -> Adapter:
        try:
            return await self._pool.adapters.load(adapter, again=again)
        except UtilityError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    async def _take_adapters(self, adapters: Sequence[Adapter]) -> None:
        self._show_adapters(adapters)

    def serve_adapters(self, models: Any) -> None:
        super().serve_adapters(models)
        unload_through(models, self._pool.adapters.unload)

    def end_all(self, status: int, message: str) -> None:
        self.dispatcher.fail_all(status, message)

    def dp_engines_running(self) -> bool:
        """Whether any request is in the cluster."""
        return bool(self.dispatcher.trips)

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """What every living worker supports, in the order of the first."""
        return self._pool.supported_tasks()

    async def get_status(self) -> dict[str, Any]:
        alive = {w.worker_id for w in self._pool.roster.alive()}
        engines = [
            {"id": w.index, "status": "healthy" if w.worker_id in alive else "dead"}
            for w in self._pool.roster.workers.values()
        ]
        return {"schema_version": 1, "total_engines": self._num_engines, "engines": engines}


def _not_on_a_cluster(what: str) -> NoReturn:
    raise GracefulHTTPError(
        f"{what} is not available on a twinpool cluster; call it on a single vLLM server", HTTPStatus.NOT_IMPLEMENTED
    )


@contextmanager
def in_place_of_engine(client: FrontEndClient) -> Iterator[None]:
    """Inside, an `AsyncLLM` that is being made gets `client` instead of starting an engine process."""
    original = EngineCoreClient.__dict__["make_async_mp_client"]

    def make(*_args: Any, **_kwargs: Any) -> FrontEndClient:
        return client

    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original
