"""What vLLM's scheduler could run in its next step: decodes, and prompts that want tokens.

Internals of vLLM 0.32 this relies on, beside those of `vllm_chunk_scheduler`:
`Scheduler.{running, max_num_active_reqs, num_waiting_for_streaming_input, finished_recving_kv_req_ids, block_size,
scheduler_reserve_full_isl}`, the statuses that `_handle_blocked_waiting_request` passes over, and
`KVCacheManager.get_computed_blocks`, which looks cached blocks up and touches nothing unless a request asks for full
cache reports.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.request import Request, RequestStatus

from prefill.chunk_order import Prefill
from prefill.urgency import Urgency

LOOKED_UP_PER_STEP = 4
"""Waiting requests whose cached prefix is looked up; vLLM does it again for those that it admits."""
WAITING_PER_STEP = 256
"""Of a longer queue only the most urgent ones are looked at."""


class Candidates:
    """Of one step. Waiting requests must be added in the order in which vLLM will try them."""

    def __init__(
        self,
        scheduler: Any,
        urgency: Callable[[Request], Urgency],
        is_doubted: Callable[[Request], bool],
        itl_s: float | None,
    ) -> None:
        self.prefills: list[Prefill] = []
        self.decode_tokens = 0
        self.itl_s: float | None = None
        """The strictest target of those that decode."""
        self.held_for: list[Request] = []
        """Waiting prompts that vLLM should admit if they get tokens."""
        self.unhindered: set[str] = set()
        """Waiting requests that need no prompt tokens now, or that vLLM passes over."""
        self.wants_scan = False
        """Somebody waits for blocks only, and vLLM looks at the queue only while the step has tokens left."""
        self._scheduler = scheduler
        self._urgency = urgency
        self._is_doubted = is_doubted
        self._default_itl_s = itl_s
        self._decode_at_most = decode_tokens_at_most(scheduler)
        self._awaits_blocks = getattr(scheduler.connector, "awaits_blocks", lambda _request_id: False)
        held_places = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        self._places = scheduler.max_num_active_reqs - held_places
        cache = scheduler.kv_cache_manager
        self._free_blocks = cache.block_pool.get_num_free_blocks() - cache.watermark_blocks
        self._looked_up = 0
        self._stopped = False
        """vLLM's scan of the queue will not get past a request seen already."""

    def add_running(self, requests: Iterable[Request]) -> None:
        for request in requests:
            left = tokens_left(request, request.num_computed_tokens)
            if left > self._decode_at_most:
                self.prefills.append(self.view(request, left))
                # It has begun, so what it still needs is not free for others: it would be preempted later.
                self._free_blocks -= -(-left // self._scheduler.block_size)
            elif left > 0:
                self._add_decode(request, left)

    def add_waiting(self, requests: Iterable[Request], *, hold_blocks: bool = False) -> None:
        for _, request in zip(range(WAITING_PER_STEP), requests, strict=False):
            if not _is_ready(request, self._scheduler):
                self.unhindered.add(request.request_id)
                continue
            if not hold_blocks and not self._takes_blocks(request):
                self._stopped = True
            if request.num_computed_tokens == 0 and self._awaits_blocks(request.request_id):
                self.unhindered.add(request.request_id)
                self.wants_scan = True
                continue
            self._places -= 1
            if self._places < 0:
                self._stopped = True
            self._add_waiting(request, hold_blocks)

    def _add_waiting(self, request: Request, hold_blocks: bool) -> None:
        left = tokens_left(request, request.num_computed_tokens)
        if left <= self._decode_at_most:
            self.unhindered.add(request.request_id)
            if not self._stopped:
                # Where all its blocks have arrived, vLLM computes the last token again.
                self._add_decode(request, max(1, left))
            return
        certain = not self._stopped and not self._is_doubted(request)
        if certain:
            left -= self._cached_tokens(request)
            self.held_for.append(request)
        self.prefills.append(self.view(request, left, ahead=hold_blocks, certain=certain))

    def view(self, request: Request, left: int, *, ahead: bool = False, certain: bool = True) -> Prefill:
        """A request as `chunk_order` sees it."""
        urgency = self._urgency(request)
        return Prefill(
            request_id=request.request_id,
            arrival_s=urgency.arrival_s,
            deadline_s=urgency.deadline_s,
            priority=urgency.priority,
            tokens_left=max(1, left),
            tokens_total=request.num_prompt_tokens,
            ahead=ahead or request.num_output_tokens > 0,
            certain=certain,
            longest_step_s=urgency.longest_step_s,
        )

    def _add_decode(self, request: Request, tokens: int) -> None:
        self.decode_tokens += tokens
        itl_s = self._urgency(request).itl_s or self._default_itl_s
        if itl_s is not None:
            self.itl_s = itl_s if self.itl_s is None else min(self.itl_s, itl_s)

    def _takes_blocks(self, request: Request) -> bool:
        """Whether its blocks fit beside those of the requests before it; cached blocks are counted as if they did not
        exist, because nobody may hold them."""
        tokens = request.num_tokens if self._scheduler.scheduler_reserve_full_isl else 1
        self._free_blocks -= -(-tokens // self._scheduler.block_size)
        return bool(self._free_blocks >= 0)

    def _cached_tokens(self, request: Request) -> int:
        asks_for_reports = getattr(request, "kv_cache_report_mode", "incremental") == "full"
        if request.num_computed_tokens > 0 or asks_for_reports or self._looked_up == LOOKED_UP_PER_STEP:
            return 0
        self._looked_up += 1
        return int(self._scheduler.kv_cache_manager.get_computed_blocks(request)[1])


def tokens_left(request: Request, num_computed_tokens: int) -> int:
    """Tokens that vLLM would compute of a request if there were no limits."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - num_computed_tokens)


def decode_tokens_at_most(scheduler: Any) -> int:
    """A request with so few tokens to compute counts as decoding, and is never held back."""
    return 1 + int(scheduler.num_spec_tokens)


def _is_ready(request: Request, scheduler: Any) -> bool:
    match request.status:
        case RequestStatus.WAITING | RequestStatus.PREEMPTED:
            return not request.num_stale_output_tokens or request.drop_stale_output
        case RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in scheduler.finished_recving_kv_req_ids
        case RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            asked = request.structured_output_request
            return asked is not None and asked.grammar is not None and not isinstance(asked.grammar, Exception)
        case _:
            return False
