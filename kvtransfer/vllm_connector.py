"""The vLLM connector: twinpool's transfers as vLLM 0.32 calls them, in the scheduler and in each rank.

Load it with `kv_connector="TwinpoolConnector"` and `kv_connector_module_path="kvtransfer.vllm_connector"`, or
by name alone where the package is installed (`vllm_plugin.py` registers it). Works without a twinpool
proxy: a producer's reply then carries the `kv_transfer_params` to send to a consumer.
"""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvtransfer.connector import vllm_seeded_chunks
from kvtransfer.connector.step_orders import ClosedRequest, StepOrders
from kvtransfer.connector.vllm_compositions import refuse_untested
from kvtransfer.connector.vllm_content_format import content_format
from kvtransfer.connector.vllm_rank_side import RankSide, StepResults
from kvtransfer.connector.vllm_scheduler_side import SchedulerSide
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import ModelFacts, probe
from kvtransfer.rank_endpoint import RankEndpoint
from kvtransfer.transfers.layer_groups import LayerGroups
from kvtransfer.trust.door import call_with_key
from kvtransfer.trust.key import read_key

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("twinpool.kvtransfer")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to ranks."""

    orders: StepOrders


@dataclass
class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Ranks to scheduler; merged over the ranks of one step."""

    closed: list[ClosedRequest] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        assert isinstance(other, RankReport)
        return RankReport(self.closed + other.closed)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where this rank exports, for the scheduler of its own engine."""

    address: str
    epoch: str


class TwinpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One instance in the scheduler, one in each rank; each delegates to its side."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_untested(vllm_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"twinpool transfers models with one kind of KV cache; this one has "
                f"{len(kv_cache_config.kv_cache_groups)} (hybrid attention or state-space layers). Serve it without "
                "separate prefill workers."
            )
        self._settings: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._scheduler: SchedulerSide | None = None
        self._rank: RankSide | None = None
        self._endpoint: RankEndpoint | None = None
        self._results = StepResults()
        self._report_socket: zmq.Socket[bytes] | None = None
        if role == KVConnectorRole.SCHEDULER:
            block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self._scheduler = SchedulerSide(block_size)
            if report_to := self._settings.get("report_to"):
                self._report_socket = zmq.Context.instance().socket(zmq.DEALER)
                self._report_socket.setsockopt(zmq.LINGER, 0)
                key_file = self._settings.get("key_file")
                call_with_key(self._report_socket, report_to, read_key(Path(key_file)) if key_file else None)
                self._report_socket.connect(report_to)

    # --- in each rank ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        vllm_seeded_chunks.install()
        config = self._vllm_config
        rank = get_tensor_model_parallel_rank()
        spec: Any = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        facts = ModelFacts(
            model=config.model_config.model,
            dtype=str(config.model_config.dtype),
            kv_dtype=str(spec.dtype),
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            block_size=spec.block_size,
            layout_name=str(config.cache_config.kv_cache_layout),
            attention_backend=get_current_attn_backend(config).get_name(),
            tp_size=config.parallel_config.tensor_parallel_size,
            total_kv_heads=1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads(),
            content_format=content_format(config, spec),
        )
        known = {setting.name for setting in dataclasses.fields(EndpointSettings)}
        settings = {name: value for name, value in self._settings.items() if name in known}
        caches = probe(kv_caches, self._kv_cache_config.num_blocks, facts)
        groups = self._layer_groups(caches.layout.layer_names)
        self._endpoint = RankEndpoint(EndpointSettings(rank=rank, **settings), caches)
        self._rank = RankSide(self._endpoint, self._endpoint.compute_fence(_compute_stream), groups)

    def _layer_groups(self, layer_names: Sequence[str]) -> LayerGroups:
        layers_per_group = int(self._settings.get("announce_layers", 0))
        if layers_per_group > 0 and self._vllm_config.parallel_config.use_ubatching:
            # `save_kv_layer` would be called for the first micro-batch, before the layer is computed for the others.
            log.warning("layers_not_announced reason=the_engine_computes_in_micro_batches")
            layers_per_group = 0
        return LayerGroups(layer_names, layers_per_group)

    def get_handshake_metadata(self) -> RankHandshake | None:
        return RankHandshake(self._endpoint.address, self._endpoint.epoch) if self._endpoint else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Called before the forward pass: what other engines wait for must not wait for this one's computation.
        if self._rank is not None:
            self._rank.before_forward(self._orders())

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads run between steps, in the endpoint's own threads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request runs before all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        if self._rank is not None:
            self._rank.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        if self._rank is not None:
            self._rank.after_forward(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._rank is None:
            return KVConnectorTransferResults()
        self._results = self._rank.take_results(self._orders())
        return KVConnectorTransferResults(finished_sending=self._results.sent, finished_recving=self._results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._results.bad_block_ids

    def build_connector_worker_meta(self) -> RankReport | None:
        return RankReport(self._results.closed) if self._results.closed else None

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    # --- in the scheduler ------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side().bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._side().exporter_ranks = [
            {"rank": rank, "address": handshake.address, "epoch": handshake.epoch}
            for rank, handshake in sorted(metadata.items())
            if isinstance(handshake, RankHandshake)
        ]

    def on_new_request(self, request: "Request") -> None:
        self._side().on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._side().num_tokens_to_load(request, num_computed_tokens)

    def awaits_blocks(self, request_id: str) -> bool:
        """For our own scheduler; vLLM does not call it."""
        return self._side().awaits_blocks(request_id)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        self._side().blocks_allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        return StepMetadata(self._side().build_orders(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if isinstance(report := connector_output.kv_connector_worker_meta, RankReport):
            self._side().imports_closed(report.closed)
        sent, received = connector_output.finished_sending, connector_output.finished_recving
        self._side().blocks_released((sent or set()) | (received or set()))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._side().request_finished(request)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        # The last hook of a step, after freed blocks went back to the pool.
        if self._report_socket is not None and (stats := self._side().pool_stats()) is not None:
            try:
                self._report_socket.send(msgspec.msgpack.encode(stats), zmq.NOBLOCK)
            except zmq.Again:
                log.warning("pool_stats_not_sent reason=host_does_not_read")
        return ()

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a scheduler hook of the connector was called in a rank process")
        return self._scheduler

    # --- both ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()
        if self._report_socket is not None:
            self._report_socket.close()


def _compute_stream() -> int:
    """The CUDA stream that the calling thread computes in; asked for only when the caches are on a GPU."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)
