"""A cluster in a loop: the real scheduler, engines that take exactly as long as a cost model says, no sockets."""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from proxy.scheduling.capacity.costs import CostModel
from proxy.scheduling.place import Local, PrefillOnly, Reject, Remote
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import RequestShape

CHUNK = 512


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    shape: RequestShape
    arrived_s: float
    output_tokens: int
    first_token_s: float | None = None
    refused_s: float | None = None
    refused: Reject | None = None
    prefilled_by: str = ""
    computed_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def in_time(self) -> bool:
        return self.ttft_s <= self.shape.standing.slo.ttft_s


@dataclass(slots=True, eq=False)
class Engine:
    """A prefill engine: one chunk at a time, of the most urgent prompt or of the one that came first."""

    costs: CostModel
    by_deadline: bool
    jobs: list[tuple[Any, int, list[Any]]] = field(default_factory=list)  # urgency, number, [request, tokens left]
    busy: bool = False
    busy_s: float = 0.0


class Simulation:
    """`run` takes requests in order of arrival and returns when all of them have ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefill: Iterable[str],
        costs: Callable[[], CostModel],
        step_s: float = 0.02,
        by_deadline: bool = True,
        cached: Callable[[str, Request], int] = lambda _worker, _request: 0,
        on_prefilled: Callable[[str, Request], None] = lambda _worker, _request: None,
    ) -> None:
        self.scheduler = scheduler
        self.engines = {worker_id: Engine(costs(), by_deadline) for worker_id in prefill}
        self.step_s = step_s
        self.max_waiting = 0
        self.now_s = 0.0
        self._cached, self._on_prefilled = cached, on_prefilled
        self._requests: dict[str, Request] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def run(self, requests: Iterable[Request], timeout_s: float = 30.0) -> None:
        for request in requests:
            self._requests[request.request_id] = request
            self._at(request.arrived_s, lambda request=request: self._arrives(request))
        last_s = max(request.arrived_s for request in self._requests.values())
        for second in range(int(last_s + timeout_s) + 2):
            self._at(float(second), lambda: self._expire(timeout_s))
        while self._events:
            self.now_s, _, event = heappop(self._events)
            event()
            self._decide()
            self.max_waiting = max(self.max_waiting, self.scheduler.num_waiting)

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._numbers), event))

    def _arrives(self, request: Request) -> None:
        self.scheduler.add(request.request_id, request.shape, request.arrived_s, self.now_s)

    def _expire(self, timeout_s: float) -> None:
        for request_id in self.scheduler.expire(self.now_s, timeout_s):
            self._requests[request_id].refused_s = self.now_s

    def _decide(self) -> None:
        for decision in self.scheduler.place(self.now_s):
            request = self._requests[decision.request_id]
            match decision.placement:
                case Remote(worker, _, _) | PrefillOnly(worker, _):
                    self._prefill(worker, request, decision.demoted)
                case Local(worker, _):
                    self._at(self.now_s + self.step_s, lambda request=request: self._first_token(request))
                case Reject() as refused:
                    request.refused_s, request.refused = self.now_s, refused

    def _prefill(self, worker: str, request: Request, demoted: bool) -> None:
        engine = self.engines[worker]
        standing = request.shape.standing
        number = next(self._numbers)
        urgency = (
            demoted,
            standing.priority,
            request.arrived_s + standing.slo.ttft_s if engine.by_deadline else number,
        )
        cached = self._cached(worker, request)
        request.prefilled_by, request.computed_tokens = worker, request.shape.num_prompt_tokens - cached
        heappush(engine.jobs, (urgency, number, [request, request.computed_tokens, cached]))
        if not engine.busy:
            self._chunk(worker)

    def _chunk(self, worker: str) -> None:
        engine = self.engines[worker]
        engine.busy = bool(engine.jobs)
        if not engine.jobs:
            return
        job = engine.jobs[0][2]
        tokens = min(CHUNK, job[1])
        seconds = engine.costs.prefill_s(tokens, job[2])
        engine.busy_s += seconds
        self._at(self.now_s + seconds, lambda: self._chunk_ends(worker, job, tokens))

    def _chunk_ends(self, worker: str, job: list[Any], tokens: int) -> None:
        engine = self.engines[worker]
        job[1] -= tokens
        job[2] += tokens
        if job[1] == 0:
            entry = next(item for item in engine.jobs if item[2] is job)
            engine.jobs.remove(entry)
            engine.jobs.sort()
            self._on_prefilled(worker, job[0])
            self._first_token(job[0])
        self._chunk(worker)

    def _first_token(self, request: Request) -> None:
        request.first_token_s = self.now_s
        self.scheduler.complete(request.request_id, self.now_s)
        self._at(self.now_s + self.step_s * (request.output_tokens - 1), lambda: self._ends(request))

    def _ends(self, request: Request) -> None:
        self.scheduler.remove(request.request_id, self.now_s, request.output_tokens)


def poisson(
    rate: float, seconds: float, shape: RequestShape, name: str, seed: int, output_tokens: int = 16
) -> list[Request]:
    """Requests of one kind."""
    draw = random.Random(seed)
    requests: list[Request] = []
    at_s = draw.expovariate(rate)
    while at_s < seconds:
        requests.append(Request(f"{name}-{len(requests)}", shape, at_s, output_tokens))
        at_s += draw.expovariate(rate)
    return requests
