"""Fails loudly when the vLLM internals under the connector and the worker host move."""

import inspect

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvtransfer.vllm_connector import TwinpoolConnector

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
