"""vLLM's own server and requests with adapters, on a cluster of fake workers."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.api_router import attach_router
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX
from vllm.entrypoints.serve.sagemaker.api_router import sagemaker_standards_bootstrap
from vllm.exceptions import GracefulHTTPError, LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from proxy.adapters.adapter import Adapter
from proxy.adapters.vllm_adapters import UNGUARDED, adapter_of, drop_unguarded_routes
from proxy.api_servers.control import is_control
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, failure, mini_cluster, read, until

POET = Adapter("poet", "/adapters/poet")
OFFERED = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


def models_of(cluster: MiniCluster) -> OpenAIServingModels:
    """vLLM's list of models, as its API server has it."""

    async def add_lora(request: LoRARequest) -> bool:
        return await cluster.client.add_lora_async(request)

    engine = SimpleNamespace(model_config=SimpleNamespace(model="m"), renderer=None, input_processor=None)
    engine.add_lora = add_lora
    models = OpenAIServingModels(engine, [BaseModelPath("base", "m")])
    cluster.client.serve_adapters(models)
    return models


async def load(models: OpenAIServingModels, name: str = "poet", **more: Any) -> ErrorResponse | str:
    return await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=f"/adapters/{name}", **more))


def test_the_argument_of_the_engine_call_is_what_vllm_makes_of_its_own_class() -> None:
    for adapter in (POET, Adapter("poet", "/p", "base", True)):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode([adapter.engine_argument()]))
        method = EngineCore.add_lora.__get__(object())
        (received,) = EngineCoreProc._convert_msgspec_args(method, sent)
        assert isinstance(received, LoRARequest)
        assert adapter_of(received) == adapter
        assert (received.lora_int_id, received.load_inplace) == (adapter.adapter_id, True)
    assert list(LoRARequest.__struct_fields__) == [
        "lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace", "is_3d_lora_weight",
    ]  # fmt: skip
    assert list(inspect.signature(EngineCore.remove_lora).parameters) == ["self", "lora_id"]


def test_async_llm_passes_vllms_own_object_on() -> None:
    assert "self.engine_core.add_lora_async(lora_request)" in inspect.getsource(AsyncLLM.add_lora)


def test_no_route_for_adapters_goes_past_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    app = FastAPI(openapi_url=None)
    attach_router(app)
    sagemaker_standards_bootstrap(app)
    assert {route.path for route in app.routes} - OFFERED == {UNGUARDED, f"{UNGUARDED}/{{adapter_name}}"}
    drop_unguarded_routes(app)
    assert {route.path for route in app.routes} == OFFERED
    assert all(path.startswith(GUARDED_PREFIX) and is_control(path) for path in OFFERED)


async def test_vllms_endpoints_load_into_every_worker_and_requests_name_the_adapter_alike(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        assert await load(models) == "Success: LoRA adapter 'poet' added successfully."
        assert [worker.utilities for worker in cluster.workers.values()] == [
            [("add_lora", [POET.engine_argument()])]
        ] * 2
        resolved = models.lora_requests["poet"]
        assert (resolved.lora_int_id, resolved.load_inplace) == (POET.adapter_id, False)
        request = cluster.request()
        request.lora_request = resolved
        assert (await read(await cluster.add(request))).tokens[0] == generate(PROMPT, 5)
        for worker in cluster.workers.values():
            (leg,) = worker.submitted
            assert (leg.lora_request.lora_int_id, leg.lora_request.lora_path) == (POET.adapter_id, "/adapters/poet")


async def test_an_adapter_that_one_worker_cannot_load_is_not_listed(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        cluster["decode-0"].utility_error = "Exception: rank 64 is too large"
        error = await load(models)
        assert isinstance(error, ErrorResponse)
        assert (error.error.code, "worker decode-0: Exception: rank 64" in error.error.message) == (500, True)
        not_found = f"Exception: {LoRAAdapterNotFoundError('poet', '/adapters/poet')}"
        cluster["decode-0"].utility_error = not_found
        missing_there = await load(models)
        assert isinstance(missing_there, ErrorResponse)
        assert (missing_there.error.code, "worker decode-0" in missing_there.error.message) == (500, True)
        cluster["prefill-0"].utility_error = not_found
        missing = await load(models)
        assert isinstance(missing, ErrorResponse)
        assert missing.error.code == 404
        assert models.lora_requests == {}
        undone = ["add_lora", "remove_lora"]
        assert [method for method, _ in cluster["prefill-0"].utilities] == undone * 3


async def test_a_removed_adapter_is_removed_from_workers_and_a_late_request_is_a_404(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        await load(models)
        late = cluster.request()
        late.lora_request = models.lora_requests["poet"]
        unload = UnloadLoRAAdapterRequest(lora_name="poet")
        assert await models.unload_lora_adapter(unload) == "Success: LoRA adapter 'poet' removed successfully."
        for worker in cluster.workers.values():
            assert worker.utilities[-1] == ("remove_lora", [POET.adapter_id])
        assert (await failure(cluster, await cluster.add(late))).http_status == 404
        again = await models.unload_lora_adapter(unload)
        assert isinstance(again, ErrorResponse)
        assert again.error.code == 404


async def test_a_worker_that_cannot_remove_it_is_named(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        await load(models)
        cluster["prefill-0"].utility_error = "Exception: stuck"
        error = await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="poet"))
        assert isinstance(error, ErrorResponse)
        assert "poet is offered no more, but: worker prefill-0: Exception: stuck" in error.error.message
        assert models.lora_requests == {}


async def test_weights_loaded_in_place_replace_the_old_ones_for_new_requests(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        await load(models)
        await load(models, load_inplace=True)
        resolved = models.lora_requests["poet"]
        assert (resolved.lora_path, resolved.load_inplace) == ("/adapters/poet/.", False)
        assert resolved.lora_int_id == Adapter("poet", "/adapters/poet/.").adapter_id


async def test_an_adapter_that_a_plugin_finds_is_loaded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder(LoRAResolver):  # type: ignore[misc]  # vLLM is not typed for us
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest:
            return LoRARequest(lora_name, 1, f"/found/{lora_name}")

    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {"finder": Finder()})
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        resolved = await models.resolve_lora("poet")
        assert isinstance(resolved, LoRARequest)
        assert resolved.lora_int_id == Adapter("poet", "/found/poet").adapter_id


async def test_a_worker_that_comes_gets_its_adapters_before_requests_with_them(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        await load(models)
        await cluster.restart("decode-0")
        assert cluster.pool.adapters.statuses()[0].lacking in ({}, {"decode-0": "it is being loaded"})
        request = cluster.request()
        request.lora_request = models.lora_requests["poet"]
        assert (await read(await cluster.add(request))).tokens[0] == generate(PROMPT, 5)
        assert cluster["decode-0"].utilities == [("add_lora", [POET.engine_argument()])]


async def test_requests_for_the_base_model_do_not_wait_for_adapters(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        models = models_of(cluster)
        await load(models)
        await cluster.join("decode-1")
        await until(lambda: cluster.pool.adapters.statuses()[0].lacking == {})
        cluster["decode-1"].utility_error = "Exception: no such directory"
        cluster.kill("decode-0")
        request = cluster.request()
        request.lora_request = models.lora_requests["poet"]
        assert (await read(await cluster.add(request))).tokens[0] == generate(PROMPT, 5)
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)


async def test_an_engine_call_for_adapters_says_what_is_wrong(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].utility_error = "RuntimeError: LoRA is not enabled"
        with pytest.raises(GracefulHTTPError, match="poet was not loaded: worker decode-0: RuntimeError: LoRA is not"):
            await cluster.client.add_lora_async(LoRARequest("poet", 1, "/adapters/poet"))
