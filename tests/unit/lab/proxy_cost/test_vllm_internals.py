"""vLLM's API server is where the benchmark expects it, and its engines speak as the free one does."""

import asyncio
import inspect
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.entrypoints.launchers.api_server import entry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, async_llm
from vllm.v1.engine.core_client import EngineCoreClient, MPClient
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lab.proxy_cost.engine_process import ABORT, ADD, IDENTITY, UTILITY, FreeEngine
from lab.proxy_cost.vllm_free_engine import FreeEngineClient


def request(request_id: str, max_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_vllms_server_starts_as_it_does_here() -> None:
    assert list(inspect.signature(entry.run_server_worker).parameters)[:4] == [
        "listen_address", "sock", "args", "client_config",
    ]  # fmt: skip
    source = inspect.getsource(MPClient.__init__)
    assert 'client_addresses["input_address"]' in source
    assert 'client_addresses["output_address"]' in source
    assert 'rank.to_bytes(2, "little")' in source
    assert (0).to_bytes(2, "little") == IDENTITY
    assert "if payload\n" in inspect.getsource(MPClient._apply_ready_response), "an empty message said ready"
    assert isinstance(EngineCoreClient.__dict__["make_async_mp_client"], staticmethod)
    assert inspect.getsource(async_llm.AsyncLLM.__init__).count("EngineCoreClient.make_async_mp_client(") == 1


def test_request_types_are_what_the_free_engine_knows() -> None:
    kinds = EngineCoreRequestType
    assert (kinds.ADD.value, kinds.ABORT.value, kinds.UTILITY.value) == (ADD, ABORT, UTILITY)


async def test_the_engine_in_the_server_gives_all_that_run_a_token_per_step() -> None:
    client = FreeEngineClient((5, 6, 7), 0.0)
    await client.add_request_async(request("a", 1))
    await client.add_request_async(request("b", 2))
    first, second = await client.get_output_async(), await client.get_output_async()
    assert [(o.request_id, len(o.new_token_ids), o.finished) for o in first.outputs] == [
        ("a", 1, True), ("b", 1, False),
    ]  # fmt: skip
    assert first.outputs[0].prefill_stats.num_prompt_tokens == 3
    assert [(o.request_id, o.finished) for o in second.outputs] == [("b", True)]
    assert not client.dp_engines_running()


async def test_the_engine_behind_sockets_speaks_vllms_protocol(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("in", "out")]
    context = zmq.asyncio.Context()
    router, pull = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    router.bind(addresses[0])
    pull.bind(addresses[1])
    stop = asyncio.Event()
    running = asyncio.create_task(FreeEngine(addresses[0], addresses[1], tmp_path, 0.0).run(stop))
    try:
        async with asyncio.timeout(20):
            assert await router.recv_multipart() == [IDENTITY, b""]
            call = msgspec.msgpack.encode((0, 77, "get_supported_tasks", ()))
            await router.send_multipart([IDENTITY, UTILITY, call])
            decoder = MsgpackDecoder(EngineCoreOutputs)
            answer = decoder.decode(await pull.recv_multipart())
            assert answer.utility_output.call_id == 77
            assert answer.utility_output.result.result == ["generate"]
            await router.send_multipart([IDENTITY, ADD, *MsgpackEncoder().encode(request("a", 3))])
            steps = [decoder.decode(await pull.recv_multipart()) for _ in range(3)]
            assert [[(o.request_id, o.finished) for o in step.outputs] for step in steps] == [
                [("a", False)], [("a", False)], [("a", True)],
            ]  # fmt: skip
    finally:
        stop.set()
        await running
        context.destroy(linger=0)


@pytest.mark.parametrize("name", ["add_request_async", "abort_requests_async", "get_output_async", "shutdown"])
def test_the_engine_in_the_server_replaces_what_vllm_calls(name: str) -> None:
    assert getattr(FreeEngineClient, name) is not getattr(EngineCoreClient, name)
