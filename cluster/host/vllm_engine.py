"""Starts one vLLM engine for a worker host and speaks to it.

Internals of vLLM 0.32 this relies on: `AsyncEngineArgs.create_engine_config`,
`EngineCoreClient.make_async_mp_client`, `AsyncMPClient.{add_request_async, abort_requests_async,
get_output_async, call_utility_async, shutdown}`, `MsgpackEncoder/Decoder`, `EngineCoreRequest/Outputs`, and that
`SchedulerConfig.scheduler_cls` is read when the engine core starts;
`KVEventsConfig`, `Request.kv_cache_report_mode` from `sampling_params.extra_args`; for `cluster.host.slumber`
`ModelConfig.enable_sleep_mode`, `EngineCore.{sleep, wake_up}` and that `CuMemAllocator` gives memory back at the same
addresses.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from cluster.host.leaving import WorkerStopped
from cluster.messages import EngineFacts

CONNECTOR_NAME = "TwinpoolConnector"
CONNECTOR_MODULE = "kvtransfer.vllm_connector"
# Whether KV is exported or imported is said per request, so that a worker can change its role. To vLLM it means:
# freed blocks wait for the step in flight (as loads need), and a request that is preempted with a token on its way
# computes that token again (as hand-overs need).
KV_ROLE = "kv_both"
SCHEDULER = "prefill.vllm_chunk_scheduler.ChunkScheduler"
ASYNC_SCHEDULER = "prefill.vllm_chunk_scheduler.AsyncChunkScheduler"
EVENT_BATCHES_KEPT = 1_000
"""For a host that missed some. A step of 8,000 prompt tokens makes a batch of 40 KB, a decode step one of 300 bytes."""


class EngineLost(WorkerStopped):
    """The engine core or one of its ranks died; its requests are lost."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, 1)


class RequestUnreadable(Exception):
    """The frames are not an `EngineCoreRequest` of this vLLM version."""


def cache_event_config(event_address: str, replay_address: str) -> KVEventsConfig:
    """An engine that publishes what happens in its prefix cache."""
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=event_address,
        replay_endpoint=replay_address,
        buffer_steps=EVENT_BATCHES_KEPT,
    )


def engine_config(
    model: str,
    options: dict[str, Any],
    connector_settings: dict[str, Any],
    cache_events: KVEventsConfig | None = None,
    across_nodes: bool = False,
) -> VllmConfig:
    """vLLM's configuration of an engine whose KV goes through the twinpool connector, with our order of chunks.

    `options` are keyword arguments of AsyncEngineArgs; `across_nodes`: ranks are Ray's, see `vllm_across_nodes.py`.
    Raises what vLLM raises for values it refuses.
    """
    if across_nodes:
        from cluster.host.vllm_across_nodes import AcrossNodesExecutor  # needs Ray

        options = {**options, "distributed_executor_backend": AcrossNodesExecutor}
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR_NAME,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role=KV_ROLE,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=connector_settings,
    )
    args = AsyncEngineArgs(model=model, kv_transfer_config=transfer, kv_events_config=cache_events, **options)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        # vLLM decides in the line above whether it schedules asynchronously, and takes a class of ours as it is.
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if not config.cache_config.enable_prefix_caching:
        # The operator or the model decided so; there will be no events.
        config.kv_events_config = None
    return config


class Engine:
    """One engine core and its ranks, as processes of their own, owned by this process."""

    def __init__(self, config: VllmConfig, client: AsyncMPClient, supported_tasks: Sequence[str]) -> None:
        self._config = config
        self._client = client
        self._supported_tasks = list(supported_tasks)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    @classmethod
    async def start(cls, config: VllmConfig) -> "Engine":
        """Returns when weights are loaded and the KV cache is allocated; the event loop stays free meanwhile."""
        client = await asyncio.to_thread(
            EngineCoreClient.make_async_mp_client, config, Executor.get_class(config), log_stats=True
        )
        return cls(config, client, await client.get_supported_tasks_async())

    @property
    def facts(self) -> EngineFacts:
        config = self._config
        return EngineFacts(
            model=config.model_config.model,
            max_model_len=config.model_config.max_model_len,
            block_size=config.cache_config.block_size,
            num_blocks=config.cache_config.num_gpu_blocks or 0,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
            dtype=str(config.model_config.dtype),
            supported_tasks=self._supported_tasks,
            prefix_events=config.kv_events_config is not None,
            can_sleep=bool(config.model_config.enable_sleep_mode),
        )

    def read_request(self, frames: Sequence[bytes]) -> EngineCoreRequest:
        try:
            request: EngineCoreRequest = self._decoder.decode(frames)
        except Exception as error:  # the decoder raises whatever the content provokes
            raise RequestUnreadable(f"not a request of this vLLM version: {type(error).__name__}: {error}") from error
        if request.sampling_params is not None and request.sampling_params.extra_args:
            # It would make the engine report blocks as stored that were stored before, and copies are counted.
            request.sampling_params.extra_args.pop("kv_cache_report_mode", None)
        return request

    async def submit(self, request: EngineCoreRequest) -> None:
        try:
            await self._client.add_request_async(request)
        except EngineDeadError as error:
            raise EngineLost("the engine core died") from error

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self._client.abort_requests_async(request_ids)
        except EngineDeadError as error:
            raise EngineLost("the engine core died") from error

    async def next_outputs(self) -> EngineCoreOutputs:
        """The outputs of one engine step. Raises `EngineLost` when there will be no more."""
        try:
            return await self._client.get_output_async()
        except EngineDeadError as error:
            raise EngineLost("the engine core or one of its ranks died") from error

    def outputs_frames(self, outputs: EngineCoreOutputs) -> list[Any]:
        return list(self._encoder.encode(outputs))

    def failure_frames(self, request_id: str) -> list[Any]:
        """Outputs that end one request with vLLM's internal-error reason."""
        failed = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
        return self.outputs_frames(EngineCoreOutputs(outputs=[failed]))

    async def call_utility(self, method: str, args: Sequence[Any]) -> Any:
        return await self._client.call_utility_async(method, *args)

    async def stop(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._client.shutdown, timeout_s)
