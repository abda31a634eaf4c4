"""The core client: vLLM's internals are where it expects them, and calls go to every worker."""

import asyncio
import gc
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import async_llm, output_processor
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector

from proxy.frontend.vllm_core_client import ClusterClient, in_place_of_engine
from proxy.middleware.request_context import CURRENT, RequestContext
from proxy.scheduling.slo import SloClass, Standing
from tests.unit.proxy.fake_worker import EOS
from tests.unit.proxy.mini_cluster import mini_cluster, read, until


def test_this_is_the_vllm_that_the_code_was_written_for() -> None:
    assert vllm.__version__.split("+")[0] == "0.32.0"


def test_async_llm_calls_nothing_on_its_core_client_that_we_do_not_have() -> None:
    source = inspect.getsource(async_llm)
    called = set(re.findall(r"engine_core\.(\w+)", source))
    assert "add_request_async" in called, "AsyncLLM names its core client otherwise in this vLLM"
    ours = {name for name in called if hasattr(ClusterClient, name)} | {"resources", "engine_ranks_managed"}
    assert called - ours == set()
    inherited = {
        name for name in called if getattr(ClusterClient, name, None) is getattr(EngineCoreClient, name, object())
    }
    assert inherited <= {"get_kv_event_sources"}, "inherited methods raise NotImplementedError"


def test_async_llm_makes_its_core_client_where_we_replace_it() -> None:
    source = inspect.getsource(async_llm.AsyncLLM.__init__)
    assert source.count("EngineCoreClient.make_async_mp_client(") == 1
    assert isinstance(EngineCoreClient.__dict__["make_async_mp_client"], staticmethod)


def test_the_replacement_is_undone_even_after_a_failure() -> None:
    original = EngineCoreClient.make_async_mp_client
    client: Any = object()

    def fail() -> None:
        with in_place_of_engine(client):
            assert EngineCoreClient.make_async_mp_client(vllm_config=None) is client
            raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        fail()
    assert EngineCoreClient.make_async_mp_client is original


def test_the_front_end_has_what_failures_need() -> None:
    assert list(inspect.signature(output_processor.OutputProcessor.abort_requests).parameters) == [
        "self",
        "request_ids",
        "internal",
    ]
    state = inspect.getsource(output_processor.RequestState.__init__)
    assert "self.queue = queue" in state
    assert "self.parent_req = parent_req" in state
    put = inspect.getsource(output_processor.RequestOutputCollector.put)
    assert "isinstance(output, Exception)" in put


@pytest.mark.parametrize("n", [1, 3])
async def test_transfer_parameters_from_a_client_are_a_bad_request_and_leave_nothing(tmp_path: Path, n: int) -> None:
    async with mini_cluster(tmp_path) as cluster:
        request = cluster.request(extra_args={"kv_transfer_params": {"a": 1}}, n=n, temperature=0.8)
        with pytest.raises(VLLMValidationError, match="not accepted from clients"):
            await cluster.add(request)
        cluster.assert_idle()
        assert cluster["prefill-0"].submitted == []


async def test_engine_calls_go_to_every_worker(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        assert await cluster.client.reset_prefix_cache_async(True, False) is True
        await cluster.client.reset_mm_cache_async()
        for worker in cluster.workers.values():
            assert worker.utilities == [("reset_prefix_cache", [True, False]), ("reset_mm_cache", [])]


async def test_an_engine_call_that_one_worker_cannot_do_names_it(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].utility_error = "ValueError: no such adapter"
        with pytest.raises(GracefulHTTPError, match="worker decode-0: ValueError: no such adapter"):
            await cluster.client.remove_lora_async(3)


async def test_an_engine_call_fails_when_a_worker_dies_over_it(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].freeze()
        with pytest.raises(GracefulHTTPError, match="decode-0 was not heard"):
            await cluster.client.reset_encoder_cache_async()


async def test_what_a_cluster_cannot_do_is_said_at_once(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        for call in (
            cluster.client.pause_scheduler_async(),
            cluster.client.collective_rpc_async("x"),
            cluster.client.set_weight_version_async("1"),
        ):
            with pytest.raises(GracefulHTTPError, match="not available on a twinpool cluster"):
                await call


async def test_tasks_are_those_that_every_worker_supports(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        assert await cluster.client.get_supported_tasks_async() == ("generate",)
        status = await cluster.client.get_status()
        assert [engine["status"] for engine in status["engines"]] == ["healthy", "healthy"]


async def test_a_worker_beyond_the_configured_ones_does_not_break_vllms_metrics(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "decode-0", "decode-9") as cluster:
        cluster["decode-0"].freeze()
        await until(lambda: cluster.metric("workers_alive", role="decode") == 1)
        await cluster.run()
        assert cluster["decode-9"].submitted
        assert {batch.engine_index for batch in cluster.batches} <= {0, 1}


async def test_a_dead_proxy_tells_everybody(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].gate.clear()
        collector = await cluster.add(cluster.request())
        cluster._handler.cancel()
        cluster.client.die("the proxy's task worker-socket ended")
        with pytest.raises(GracefulHTTPError, match="worker-socket"):
            await read(collector)
        assert cluster.client.resources.engine_dead
        with pytest.raises(EngineDeadError):
            await cluster.client.get_output_async()


async def test_vllms_own_way_to_free_blocks_is_not_ours(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        request = cluster.request()
        request.abort_immediately = True
        await cluster.client.add_request_async(request)
        cluster.assert_idle()


async def test_a_stop_string_found_by_the_front_end_ends_both_legs(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 0.01
        request = cluster.request(max_tokens=400)
        collector = await cluster.add(request)
        await until(lambda: len(cluster["decode-0"].submitted) == 1)
        # What AsyncLLM does when the detokenizer has found a stop string.
        cluster.front_end.abort_requests([request.request_id], internal=True)
        await cluster.client.abort_requests_async([request.request_id])
        answer = await read(collector)
        assert answer.finish_reasons == {0: "abort"}
        await until(lambda: not cluster["decode-0"].running)
        cluster.assert_idle()
        assert EOS not in answer.tokens[0]


async def test_every_child_has_the_standing_of_its_request(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].gate.clear()
        CURRENT.set(RequestContext(Standing(SloClass("gold", 0.5, 0.05), 3, "digest")))
        request = cluster.request(n=2, temperature=0.8)
        request.priority = -1
        collector = await cluster.add(request)
        standings = [trip.shape.standing for trip in cluster.client.dispatcher.trips.values()]
        assert standings == [Standing(SloClass("gold", 0.5, 0.05), 2, "digest")] * 2
        cluster["prefill-0"].gate.set()
        await read(collector)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_priority_out_of_range_is_the_clients_error(tmp_path: Path, n: int) -> None:
    async with mini_cluster(tmp_path) as cluster:
        request = cluster.request(n=n, temperature=0.8)
        request.priority = -(1 << 40)
        with pytest.raises(VLLMValidationError, match="this server takes -1000 to 1000"):
            await cluster.add(request)
        cluster.assert_idle()


async def test_who_is_turned_away_learns_when_to_come_back(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "decode-0", on_no_prefill="reject") as cluster:
        context = RequestContext()
        CURRENT.set(context)
        request = cluster.request()
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
        cluster.front_end.add_request(request, None, None, 0, collector)
        await cluster.client.add_request_async(request)
        with pytest.raises(GracefulHTTPError, match="No prefill worker is alive"):
            await read(collector)
        assert context.retry_after_s is None, "nobody knows"
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
        cluster.front_end.add_request(request, None, None, 0, collector)
        cluster.client.tell_client(request.request_id, 503, "Busy", 2.5)
        assert context.retry_after_s == 2.5
        assert cluster.front_end.request_states == {}


async def test_a_context_does_not_outlive_its_http_request(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:

        async def request() -> None:
            CURRENT.set(RequestContext())
            collector = await cluster.add(cluster.request())
            # No timeout here: its timer would keep the context.
            while not (await collector.get()).finished:
                pass

        await asyncio.create_task(request())
        gc.collect()
        await until(lambda: len(cluster.client._contexts) == 0)


def test_what_ended_at_a_stop_string_is_aborted_by_the_task_that_reads_outputs() -> None:
    handler = inspect.getsource(async_llm.AsyncLLM._run_output_handler)
    assert "engine_core.get_output_async()" in handler
    assert re.search(r"engine_core\.abort_requests_async\(\s*processed_outputs\.reqs_to_abort", handler)


def test_a_priority_of_a_client_reaches_the_core_client() -> None:
    source = inspect.getsource(InputProcessor.process_inputs)
    assert "priority=priority" in source
    assert "policy" not in source, "vLLM looks at the engine's scheduling policy now"
