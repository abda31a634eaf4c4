"""An engine that costs nothing inside vLLM's own API server: no process, no socket, no frames.

Relies on vLLM 0.32, checked by `tests/unit/lab/proxy_cost/test_vllm_internals.py`: what `AsyncLLM` calls on its core
client; `EngineCoreOutput(s)`, `PrefillStats`, `SchedulerStats`.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats


@dataclass(slots=True)
class _Running:
    prompt_tokens: int
    left: int
    begun: bool = False


class _Resources:
    engine_dead = False


class FreeEngineClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is not typed for us
    """Answers every request with `max_tokens` tokens: one more for all that run, each time it is asked."""

    def __init__(self, token_ids: tuple[int, ...], step_s: float) -> None:
        self._step_s = step_s
        self._due_s = 0.0
        self.resources = _Resources()
        self.engine_ranks_managed = [0]
        self._tokens = token_ids
        self._step = 0
        self._running: dict[str, _Running] = {}
        self._came = asyncio.Event()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or not prompt:
            raise ValueError("the free engine only generates text from token ids")
        self._running[request.request_id] = _Running(len(prompt), params.max_tokens or 1)
        self._came.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next step; everybody else has a turn of the event loop before it."""
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        while not self._running:
            self._came.clear()
            await self._came.wait()
        self._due_s = max(self._due_s, time.monotonic() - self._step_s) + self._step_s
        outputs = [self._next(request_id, running) for request_id, running in self._running.items()]
        self._step += 1
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        stats = SchedulerStats(num_running_reqs=len(self._running))
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)

    def _next(self, request_id: str, running: _Running) -> EngineCoreOutput:
        running.left -= 1
        token = self._tokens[(self._step + running.left) % len(self._tokens)]
        output = EngineCoreOutput(request_id, [token])
        if not running.begun:
            running.begun = True
            stats = PrefillStats(num_prompt_tokens=running.prompt_tokens, num_computed_tokens=running.prompt_tokens)
            output.prefill_stats = stats
        if running.left == 0:
            output.finish_reason = FinishReason.LENGTH
        return output

    def dp_engines_running(self) -> bool:
        return bool(self._running)

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        self.resources.engine_dead = True
