"""Fails loudly when the vLLM internals under the connector and the worker host move."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import attention, mla_attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvtransfer.connector.step_orders import StepOrders
from kvtransfer.vllm_connector import StepMetadata, TwinpoolConnector

PINNED = "0.32.0"


def order_of(function: object, *calls: str) -> list[int]:
    source = inspect.getsource(function)  # type: ignore[arg-type]
    missing = [call for call in calls if call not in source]
    assert not missing, f"{function} no longer calls {missing}"
    return [source.index(call) for call in calls]


def test_the_version_is_the_pinned_one() -> None:
    assert vllm.__version__ == PINNED


def test_the_connector_leaves_no_abstract_hook_open() -> None:
    assert not getattr(TwinpoolConnector, "__abstractmethods__", set())
    for name in ("take_events", "bind_connector_metadata", "get_transfer_results", "build_connector_worker_meta"):
        assert hasattr(KVConnectorBase_V1, name)


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"speculative": "ngram"}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
    ],
)
def test_the_connector_refuses_engines_whose_blocks_it_would_misread(engine: dict[str, Any], named: str) -> None:
    groups = ParallelConfig()
    assert {"pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"} <= vars(
        groups
    ).keys()
    assert VllmConfig.__dataclass_fields__["speculative_config"].default is None
    config = SimpleNamespace(
        speculative_config=engine.pop("speculative", None),
        parallel_config=SimpleNamespace(**{**vars(groups), **engine}),
        kv_transfer_config=KVTransferConfig(kv_connector="TwinpoolConnector", kv_role="kv_both"),
    )
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))])

    with pytest.raises(ValueError, match=named):
        TwinpoolConnector(config, KVConnectorRole.SCHEDULER, cache)  # type: ignore[arg-type]


def test_the_scheduler_frees_received_blocks_before_it_takes_events() -> None:
    order = order_of(
        Scheduler.update_from_output,
        "_handle_invalid_blocks(",
        "_update_from_kv_xfer_finished(",
        "connector.take_events()",
    )
    assert order == sorted(order)


def test_the_connector_hears_of_closed_imports_before_requests_become_ready() -> None:
    order = order_of(
        Scheduler._update_from_kv_xfer_finished, "update_connector_output(", "finished_recving_kv_req_ids.add("
    )
    assert order == sorted(order)


def test_orders_are_bound_before_the_forward_pass_and_results_taken_after_it() -> None:
    for runner in (KVConnectorModelRunnerMixin._get_kv_connector_output, ActiveKVConnector.pre_forward):
        assert "bind_connector_metadata(" in inspect.getsource(runner)
    for runner in (KVConnectorModelRunnerMixin._get_kv_connector_output, ActiveKVConnector.post_forward):
        order = order_of(runner, "wait_for_save()", "get_transfer_results(", "get_block_ids_with_load_errors()",
                         "build_connector_worker_meta()")  # fmt: skip
        assert order == sorted(order)


def test_a_request_can_have_its_last_prompt_token_replaced() -> None:
    source = inspect.getsource(Request.__init__)
    for name in ("self.prompt_token_ids", "self._all_token_ids", "self.block_hashes", "self._block_hasher"):
        assert name in source
    assert callable(Request.update_block_hashes)


def test_the_block_pool_can_be_counted() -> None:
    source = inspect.getsource(BlockPool.__init__)
    for name in ("self.num_gpu_blocks", "self.hash_block_size"):
        assert name in source
    assert callable(BlockPool.get_num_free_blocks)


def test_the_engine_client_offers_what_the_worker_host_calls() -> None:
    for name in ("add_request_async", "abort_requests_async", "get_output_async", "call_utility_async",
                 "get_supported_tasks_async", "shutdown"):  # fmt: skip
        assert callable(getattr(AsyncMPClient, name))


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cpu_attention_keeps_keys_and_values_of_a_head_in_planes(dtype: str, block_size: int) -> None:
    """What `resharding.forms.CPU_PLANES` says of a block, asked of the kernel that fills it."""
    from vllm import _custom_ops

    num_heads, head_size, num_tokens = 2, 64, 40
    key, value = (torch.randn(num_tokens, num_heads, head_size, dtype=getattr(torch, dtype)) for _ in range(2))
    cache = torch.zeros(4, num_heads, block_size, 2 * head_size, dtype=getattr(torch, dtype))
    planes = cache.view(4, num_heads, 2 * block_size, head_size).chunk(2, dim=2)
    slots = torch.arange(block_size, block_size + num_tokens)
    _custom_ops.cpu_attn_reshape_and_cache(key, value, *planes, slots, "vec")
    for token in range(num_tokens):
        block, place = divmod(block_size + token, block_size)
        halves = cache[block].reshape(num_heads, 2, block_size * head_size)
        assert torch.equal(halves[:, 0].reshape(num_heads, head_size, block_size)[:, :, place], key[token])
        assert torch.equal(halves[:, 1].reshape(num_heads, block_size, head_size)[:, place], value[token])


def test_ranks_hold_heads_as_vllm_deals_them_out() -> None:
    source = inspect.getsource(QKVParallelLinear)
    assert "self.num_kv_head_replicas = divide(tp_size, self.total_num_kv_heads)" in source
    assert "shard_rank = self.tp_rank // self.num_kv_head_replicas" in source


def test_the_processor_decides_how_cpu_attention_fills_a_block() -> None:
    assert "vec" in inspect.getsource(_get_attn_isa)
    assert list(inspect.signature(_get_attn_isa).parameters) == ["dtype", "block_size", "head_size", "kv_cache_dtype"]


class Layer:
    """An attention layer without attention, and the connector's rank side, in one diary."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.diary: list[str] = []
        self.kv_cache = torch.zeros(1)
        self.impl = SimpleNamespace(forward=lambda *_, **__: self.diary.append("attention"))

    def layer_computed(self, layer_name: str) -> None:
        self.diary.append(layer_name)

    def run(self, monkeypatch: pytest.MonkeyPatch, *, is_bound: bool) -> None:
        connector = object.__new__(TwinpoolConnector)
        connector._rank = self
        connector._connector_metadata = StepMetadata(StepOrders()) if is_bound else None
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        context = ForwardContext(
            no_compile_layers={self.name: self}, attn_metadata={self.name: object()}, slot_mapping={}
        )
        with override_forward_context(context):
            name: Any = attention._encode_layer_name(self.name)
            torch.ops.vllm.unified_attention_with_output(*torch.zeros(4, 1), name)


def test_the_hook_of_a_layer_is_called_with_its_name_after_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own operator, as its attention layers call it on every platform with paged caches."""
    layer = Layer("model.layers.3.self_attn.attn")
    layer.run(monkeypatch, is_bound=True)
    assert layer.diary == ["attention", "model.layers.3.self_attn.attn"]


def test_the_hook_is_not_called_outside_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up and capturing CUDA graphs bind no orders."""
    layer = Layer("model.layers.3.self_attn.attn")
    layer.run(monkeypatch, is_bound=False)
    assert layer.diary == ["attention"]


def test_keys_and_values_are_in_the_cache_before_the_hook_is_called() -> None:
    """Either attention itself writes them, or they are written right before it."""
    for source in (
        inspect.getsource(attention.Attention.forward),
        inspect.getsource(mla_attention.MLAAttention.forward),
    ):
        names = ("unified_kv_cache_update(", "unified_attention_with_output(")
        if "unified_mla" in source:
            names = ("unified_mla_kv_cache_update(", "unified_mla_attention_with_output(")
        assert 0 < source.index(names[0]) < source.index(names[1])


def test_the_hook_stays_outside_of_cuda_graphs_between_pieces() -> None:
    for module, name in (
        (attention, "unified_attention_with_output"),
        (mla_attention, "unified_mla_attention_with_output"),
    ):
        decorated = f"@eager_break_during_capture\n@maybe_transfer_kv_layer\ndef {name}("
        assert decorated in inspect.getsource(module)


def test_micro_batches_can_be_told() -> None:
    assert isinstance(ParallelConfig.use_ubatching, property)
