"""vLLM's scheduler with our order of chunks, and with the prompt tokens of a step bounded where decodes run in it.

Before each step two things are decided: how many prompt tokens it may hold (`step_budget`), and who gets them
(`chunk_order`). vLLM's own `schedule()` then runs with both as limits: a prompt that gets nothing is skipped where it
stands and keeps its blocks, and the waiting queue is in order of urgency. Nothing is taken out of vLLM's lists, so
aborts, preemption and vLLM's own counts work as ever.

The engine core imports one of the two classes at the bottom by name, in workers of both roles.

Internals of vLLM 0.32 this relies on:
  * `Scheduler.schedule` asks `_reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)` once for each
    request it looks at, running ones first. 0 skips a running request and ends the scan of the waiting ones.
  * It tries `kv_holding_waiting` before `waiting`, both from the front, and stops at the first request that gets no
    blocks (`full_sequence_must_fit`) or no place (`max_num_active_reqs`). Requests in a blocked status are passed over.
  * `running` may be in any order; without priorities the last one is preempted first.
  * `schedule` counts the tokens of the step as computed (`Request.num_computed_tokens`) before it returns, and
    `update_from_output` is called once for each `SchedulerOutput`.
  * `Request.{num_tokens_with_spec, num_output_placeholders, num_computed_tokens, is_prefill_chunk, has_encoder_inputs,
    sampling_params}`, and that requests
    can be referred to weakly; `KVCacheManager.{get_computed_blocks, watermark_blocks, block_pool}`.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from prefill.chunk_order import by_urgency, held_up_s, owed_a_share, share_out, step_s
from prefill.step_budget import fill_tokens, prefill_budget, yielding_budget
from prefill.step_cost import CPU_PRIOR, GPU_PRIOR, StepCosts, pairs_of
from prefill.urgency import Urgency, read_urgency
from prefill.vllm_candidates import Candidates, decode_tokens_at_most, tokens_left

log = logging.getLogger("twinpool.prefill")

DOUBTED_STEPS = 8
"""So many steps nothing is held back for a request that vLLM did not admit although tokens were held back for it."""
_STEPS_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was not answered yet."""

    at_s: float
    prefill_tokens: int
    decode_tokens: int
    pairs: float


class ChunkScheduler(Scheduler):  # type: ignore[misc]
    """Without async scheduling."""

    running: list[Request]
    waiting: RequestQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        transfer = self.vllm_config.kv_transfer_config
        settings: Mapping[str, Any] = transfer.kv_connector_extra_config if transfer is not None else {}
        self._by_deadline = settings.get("chunk_order", "deadline") == "deadline"
        self._itl_s: float | None = settings.get("itl_s")
        # Where vLLM must choose the ends of chunks itself, only the order of the waiting queue is ours.
        self._may_cut = self.scheduler_config.enable_chunked_prefill and not self.need_mamba_block_aligned_split
        self._costs = StepCosts(CPU_PRIOR if current_platform.is_cpu() else GPU_PRIOR)
        self._urgencies: WeakKeyDictionary[Request, Urgency] = WeakKeyDictionary()
        self._doubted_until: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._shares: Mapping[str, int] | None = None
        """Prompt tokens by request id in the step being scheduled; None: no limits of ours."""
        self._begun: dict[int, _Begun] = {}
        """By id of a `SchedulerOutput` that was not answered yet."""
        self._answered_s = 0.0
        if self._by_deadline and not isinstance(self.waiting, FCFSRequestQueue):
            # A heap cannot be put into our order; `policy` still chooses whom vLLM preempts.
            self.waiting, self.kv_holding_waiting = FCFSRequestQueue(), FCFSRequestQueue()

    # --- arrival ---------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        now_s = time.monotonic()
        try:
            self._urgencies[request] = read_urgency(extra_args, now_s, request.priority)
        except ValueError as error:
            # An exception here would end the engine, and with it everybody else's requests.
            log.warning("urgency_ignored request=%s reason=%s", request.request_id, error)
            self._urgencies[request] = read_urgency(None, now_s, request.priority)
        super().add_request(request)

    # --- one step --------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s = time.monotonic()
        held_for = self._plan(now_s)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._shares = None
        for request in held_for:
            if request.request_id not in output.num_scheduled_tokens:
                self._doubted_until[request] = self.current_step + DOUBTED_STEPS
        if output.total_num_scheduled_tokens > 0:
            self._begun[id(output)] = _Begun(now_s, *self._held(output))
            if len(self._begun) > _STEPS_IN_FLIGHT:
                del self._begun[next(iter(self._begun))]
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        begun = self._begun.pop(id(scheduler_output), None)
        now_s = time.monotonic()
        if begun is not None:
            # With async scheduling a step is scheduled while the one before it runs, and begins when that ends.
            seconds = now_s - max(begun.at_s, self._answered_s)
            self._costs.observe(begun.prefill_tokens, begun.decode_tokens, seconds, begun.pairs)
        self._answered_s = now_s
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        return outputs

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        if self._shares is not None and tokens_left(request, num_computed_tokens) > decode_tokens_at_most(self):
            share = self._shares.get(request.request_id, 0)
            # Where a picture may be cut is for vLLM to say: such a prompt gets all it wants or nothing.
            if share == 0 or not request.has_encoder_inputs:
                num_new_tokens = min(num_new_tokens, share)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))

    def _held(self, output: SchedulerOutput) -> tuple[int, int, float]:
        """Prefill tokens, decode tokens and pairs of attention of a step that was just scheduled."""
        prefill_tokens, decode_tokens, pairs, at_most = 0, 0, 0.0, decode_tokens_at_most(self)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens <= at_most:
                decode_tokens += num_tokens
            else:
                prefill_tokens += num_tokens
                # vLLM has counted them as computed already.
                pairs += pairs_of(num_tokens, self.requests[request_id].num_computed_tokens - num_tokens)
        return prefill_tokens, decode_tokens, pairs

    # --- what the step may hold ------------------------------------------------------------------

    def _plan(self, now_s: float) -> list[Request]:
        """Sets the limits of the next step and the order of the queue. Returns for whom tokens are held back."""
        if not (self.waiting or self.kv_holding_waiting or any(r.is_prefill_chunk for r in self.running)):
            return []  # mostly so on decode workers, where many requests run
        step = Candidates(self, self._urgency, self._is_doubted, self._itl_s)
        step.add_running(self.running)
        step.add_waiting(self.kv_holding_waiting, hold_blocks=True)
        if self._pause_state == PauseState.UNPAUSED:
            if self._by_deadline:
                self._put_in_order(self._ranked(step, self.waiting, now_s))
            step.add_waiting(self.waiting)
        if self._may_cut and step.prefills and (self._by_deadline or step.decode_tokens):
            self._shares = self._share_out(step, now_s)
        if self._shares is None:
            return []
        if self._by_deadline:
            # vLLM's scan ends at the first request that gets nothing.
            goes_on = step.unhindered.union(self._shares)
            self._put_in_order(sorted(self.waiting, key=lambda request: request.request_id not in goes_on))
            # And it preempts from the end, so the least urgent prompt belongs there.
            prompts = {prefill.request_id for prefill in step.prefills}
            decoding = [r for r in self.running if r.request_id not in prompts]
            prefilling = [r for r in self.running if r.request_id in prompts]
            self.running = decoding + self._ranked(step, prefilling, now_s)
        return [request for request in step.held_for if self._shares.get(request.request_id)]

    def _share_out(self, step: Candidates, now_s: float) -> dict[str, int]:
        cost = self._costs.cost
        all_tokens = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        budget = max(0, all_tokens - step.decode_tokens - step.wants_scan)
        ranked = by_urgency(step.prefills, now_s, self._takes_s) if self._by_deadline else step.prefills
        first = ranked[0]
        if step.itl_s is not None:
            budget = prefill_budget(cost, step.decode_tokens, step.itl_s, budget, first.before, self._costs.overrun)
        if not self._by_deadline:
            return share_out(ranked, budget, budget)
        budget = yielding_budget(cost, step_s(ranked, now_s, self._takes_s), budget, first.before)
        fill = budget
        if not step.decode_tokens:
            fill = fill_tokens(cost, first.tokens_left, held_up_s(ranked, now_s, self._takes_s), budget)
        return share_out(ranked, budget, fill, owed_a_share(ranked, now_s, self._takes_s))

    def _takes_s(self, num_tokens: int, before: int) -> float:
        return self._costs.cost.prompt_s(num_tokens, pairs_of(num_tokens, before))

    def _put_in_order(self, requests: list[Request]) -> None:
        self.waiting.clear()
        self.waiting.extend(requests)

    def _ranked(self, step: Candidates, requests: Iterable[Request], now_s: float) -> list[Request]:
        by_id = {request.request_id: request for request in requests}
        views = [step.view(r, tokens_left(r, r.num_computed_tokens)) for r in by_id.values()]
        return [by_id[p.request_id] for p in by_urgency(views, now_s, self._takes_s)]

    def _is_doubted(self, request: Request) -> bool:
        return bool(self._doubted_until.get(request, 0) > self.current_step)

    def _urgency(self, request: Request) -> Urgency:
        urgency = self._urgencies.get(request)
        if urgency is None:
            urgency = self._urgencies[request] = read_urgency(None, time.monotonic(), request.priority)
        return urgency


class AsyncChunkScheduler(ChunkScheduler, AsyncScheduler):  # type: ignore[misc]
    """With async scheduling, which vLLM leaves off for schedulers that do not descend from its own for it."""
