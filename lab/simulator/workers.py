"""Simulated workers: engines that take as long as their costs say, as simpy processes."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import simpy

from lab.simulator.chunks import Job, next_chunk, share, together
from lab.simulator.costs import StepTimes
from lab.simulator.request import Request

MAX_SEQUENCES = 512
ITL_MARGIN = 0.9
"""Part of the target for gaps that a step with a chunk may take, as in `prefill.step_budget`."""
MIN_PREFILL_TOKENS = 16
"""A prompt makes at least this progress per step, as there."""


class PrefillWorker:
    """Computes chunks of the most urgent prompts. `on_prefilled` is called when one ends."""

    def __init__(
        self,
        env: simpy.Environment,
        worker_id: str,
        steps: StepTimes,
        chunk_tokens: int,
        on_prefilled: Callable[[Request, int], None],
    ) -> None:
        """`on_prefilled(request, tokens of its last chunk)`."""
        self.worker_id = worker_id
        self.steps = steps
        self.busy_s = 0.0
        self._env = env
        self._chunk_tokens = chunk_tokens
        self._on_prefilled = on_prefilled
        self._jobs: list[Job] = []
        self._wake = env.event()
        self.process = env.process(self._run())

    def submit(self, request: Request, cached_tokens: int, demoted: bool) -> None:
        """A request of which so many tokens need not be computed; who is demoted ranks as if it had only just come."""
        standing = request.shape.standing
        deadline_s = (self._env.now if demoted else request.arrived_s) + standing.slo.ttft_s
        left = max(1, request.context_tokens - cached_tokens)
        self._jobs.append(Job(request, left, request.context_tokens - left, deadline_s))
        if not self._wake.triggered:
            self._wake.succeed()

    def leave(self, request: Request) -> None:
        """It goes on elsewhere."""
        self._jobs = [job for job in self._jobs if job.request is not request]

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def drop_all(self) -> None:
        """The worker dies."""
        self._jobs = []

    def _run(self) -> simpy.events.ProcessGenerator:
        while True:
            if not self._jobs:
                self._wake = self._env.event()
                yield self._wake
                continue
            self._jobs.sort(key=lambda job: job.urgency)
            chunk = next_chunk(self._jobs, self.steps, self._chunk_tokens, self._env.now)
            tokens, already = together(chunk)
            seconds = self.steps.step_s(0, 0, tokens, already)
            self.busy_s += seconds
            yield self._env.timeout(seconds)
            for job, part in chunk:
                job.tokens_left -= part
                job.already += part
                if job.tokens_left == 0 and job in self._jobs:
                    self._jobs.remove(job)
                    self._on_prefilled(job.request, part)


class DecodeWorker:
    """Steps over all its sequences; prompts that are prefilled here go along, a chunk per step."""

    def __init__(
        self,
        env: simpy.Environment,
        worker_id: str,
        steps: StepTimes,
        local_chunk_tokens: int,
        on_token: Callable[[Request, "DecodeWorker"], None],
        on_step: Callable[["DecodeWorker", bool], None] = lambda _worker, _goes_on: None,
        *,
        holds_itl: bool = False,
    ) -> None:
        """`on_step(worker, some of its sequences had a token in the step before)`. `holds_itl`: chunks beside streams
        are so short that every gap stays within its target, as the scheduler in our engines sees to."""
        self.worker_id = worker_id
        self.steps = steps
        self.busy_s = 0.0
        self.num_steps = 0
        self._env = env
        self._local_chunk = local_chunk_tokens
        self._on_token = on_token
        self._on_step = on_step
        self._holds_itl = holds_itl
        self._active: list[Request] = []
        self._local: deque[Job] = deque()
        self._context_tokens = 0
        self._stepped_before = False
        self._wake = env.event()
        self.process = env.process(self._run())

    @property
    def num_running(self) -> int:
        return len(self._active) + len(self._local)

    @property
    def kv_tokens(self) -> int:
        """Held now."""
        return self._context_tokens

    def join(self, request: Request) -> None:
        """Its KV is here; it decodes from the next step on."""
        self._active.append(request)
        self._context_tokens += request.context_tokens
        self._rouse()

    def submit(self, request: Request, cached_tokens: int) -> None:
        """Prefill and decode here."""
        left = max(1, request.context_tokens - cached_tokens)
        self._local.append(Job(request, left, request.context_tokens - left))
        self._rouse()

    def leave(self, request: Request) -> None:
        """It goes on elsewhere."""
        if request in self._active:
            self._active.remove(request)
            self._context_tokens -= request.context_tokens
        self._local = deque(job for job in self._local if job.request is not request)

    def drop_all(self) -> None:
        """The worker dies."""
        self._active, self._context_tokens = [], 0
        self._local.clear()

    def _rouse(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> simpy.events.ProcessGenerator:
        while True:
            if not self._active and not self._local:
                self._stepped_before = False
                self._wake = self._env.event()
                yield self._wake
                continue
            stepped = self._active[:MAX_SEQUENCES]
            context = self._context_tokens / len(self._active) if self._active else 0
            chunks = share(self._local, self._budget(len(stepped), context)) if self._local else []
            tokens, already = together(chunks) if chunks else (0, 0)
            seconds = self.steps.step_s(len(stepped), context, tokens, already)
            self.busy_s += seconds
            self.num_steps += 1
            yield self._env.timeout(seconds)
            for request in stepped:
                if not request.finished and request.decode == self.worker_id:
                    self._token(request)
            if stepped:
                self._on_step(self, self._stepped_before)
            self._stepped_before = bool(stepped)
            for job, part in chunks:
                job.tokens_left -= part
                job.already += part
                if job.tokens_left == 0 and job in self._local:
                    self._local.remove(job)
                    self._active.append(job.request)
                    self._context_tokens += job.request.context_tokens
                    self._token(job.request)
            if any(request.finished for request in self._active):
                for request in self._active:
                    if request.finished:
                        self._context_tokens -= request.context_tokens
                self._active = [request for request in self._active if not request.finished]
                self._context_tokens = max(0, self._context_tokens) if self._active else 0

    def _budget(self, decodes: int, context: float) -> int:
        budget = self._local_chunk
        if not self._holds_itl or not decodes:
            return budget
        streams = itertools.chain(self._active, (job.request for job in self._local))
        longest_s = ITL_MARGIN * min(request.shape.standing.slo.itl_s for request in streams)
        already = self._local[0].already
        while budget > MIN_PREFILL_TOKENS and self.steps.step_s(decodes, context, budget, already) > longest_s:
            budget //= 2
        return budget

    def _token(self, request: Request) -> None:
        request.token(self._env.now)
        self._context_tokens += 1
        self._on_token(request, self)


class PrefixCaches:
    """What prefill workers have cached: blocks of traces, the least recently used leave. `CachedPrefixes`.

    Of one prompt the end leaves first, as in vLLM: without its beginning the rest could not be found.
    """

    def __init__(self, capacity_tokens: int | None) -> None:
        """`capacity_tokens`: of each worker; None: no bound."""
        self._capacity = capacity_tokens
        self._of: dict[str, OrderedDict[int, int]] = {}
        self._held: dict[str, int] = {}

    def cached_tokens(self, prompt: Any) -> dict[str, int]:
        """Tokens of the longest beginning that each worker has."""
        found: dict[str, int] = {}
        for worker_id, blocks in self._of.items():
            count = 0
            for block_id in getattr(prompt, "block_ids", ()):
                if block_id not in blocks:
                    break
                count += blocks[block_id]
            if count:
                found[worker_id] = count
        return found

    def store(self, worker_id: str, block_ids: tuple[int, ...], block_tokens: int) -> None:
        """A worker has computed a prompt of these blocks."""
        blocks = self._of.setdefault(worker_id, OrderedDict())
        for block_id in reversed(block_ids):
            if block_id not in blocks:
                self._held[worker_id] = self._held.get(worker_id, 0) + block_tokens
            blocks[block_id] = block_tokens
            blocks.move_to_end(block_id)
        while self._capacity is not None and self._held.get(worker_id, 0) > self._capacity and blocks:
            _, tokens = blocks.popitem(last=False)
            self._held[worker_id] -= tokens

    def forget(self, worker_id: str) -> None:
        """The worker died."""
        self._of.pop(worker_id, None)
        self._held.pop(worker_id, None)
