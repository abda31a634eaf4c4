"""vLLM's own list of adapters, kept equal to the cluster's.

Relies on vLLM 0.32, checked by `tests/unit/proxy/adapters/test_vllm_adapters.py`: `OpenAIServingModels.lora_requests`,
by name, is what requests are resolved with and `/v1/models` shows; `load_lora_adapter` and `resolve_lora` make a
`LoRARequest`, await `engine_client.add_lora` with it, and put that same object into the list; `unload_lora_adapter`
takes it out and tells no engine; `AsyncLLM.add_lora` passes the object on to the core client as it is. The API key
guards paths that begin with `GUARDED_PREFIX`; the routes for SageMaker are not among them.
"""

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.request import LoRARequest

from proxy.adapters.adapter import Adapter
from proxy.workers.engine_calls import UtilityError

UNGUARDED = "/adapters"


def adapter_of(request: LoRARequest) -> Adapter:
    """What vLLM's server wants to be loaded."""
    return Adapter(request.lora_name, request.lora_path, request.base_model_name, request.is_3d_lora_weight)


def settle(request: LoRARequest, loaded: Adapter) -> None:
    """Makes vLLM's object, which every request with the adapter will carry, name the adapter as workers know it."""
    request.lora_int_id, request.lora_path = loaded.adapter_id, loaded.path
    # Else engines would read the weights from disk again at every step.
    request.load_inplace = False


def show(models: OpenAIServingModels, adapters: Iterable[Adapter]) -> None:
    """From now on exactly these can be asked for."""
    wanted = {adapter.name: adapter for adapter in adapters}
    for name in [name for name in models.lora_requests if name not in wanted]:
        del models.lora_requests[name]
    for name, adapter in wanted.items():
        known = models.lora_requests.get(name)
        if known is None or known.lora_int_id != adapter.adapter_id:
            models.lora_requests[name] = LoRARequest(
                lora_name=name,
                lora_int_id=adapter.adapter_id,
                lora_path=adapter.path,
                base_model_name=adapter.base_model_name,
                is_3d_lora_weight=adapter.is_3d_lora_weight,
            )


def drop_unguarded_routes(app: FastAPI) -> None:
    """vLLM offers loading and unloading once more, where nobody is asked for the API key."""
    app.router.routes[:] = [r for r in app.router.routes if not getattr(r, "path", "").startswith(UNGUARDED)]


def unload_through(models: OpenAIServingModels, unload: Callable[[str], Awaitable[None]]) -> None:
    """`unload` is awaited with the name of every adapter that an operator removes; it may raise `UtilityError`."""
    vllms_own = models.unload_lora_adapter

    async def unload_lora_adapter(request: Any) -> ErrorResponse | str:
        answer = await vllms_own(request)
        if isinstance(answer, ErrorResponse):
            return answer
        try:
            await unload(request.lora_name)
        except UtilityError as error:
            return create_error_response(
                message=str(error),
                err_type="InternalServerError",
                status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
            )
        return answer

    models.unload_lora_adapter = unload_lora_adapter
