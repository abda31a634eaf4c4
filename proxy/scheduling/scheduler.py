"""The queue of the whole cluster, and the books of who has been given what.

    add, follow   a request wants a place, or follows a sibling      remove     it wants none any more, or has ended
    place         who goes where now                                 complete   a prompt has been computed
    observe_*     what workers are, say and do                       expire     who has waited for too long

Binding is late: a request leaves the queue when a prefill worker has no more than about two chunk budgets before it and
a decode worker has room for its prompt and the expected answer, so order can change until then. Pure and deterministic:
every time is an argument (seconds on any clock), and `lab` runs the same object.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from proxy.scheduling.capacity.books import Books
from proxy.scheduling.capacity.demand import Demand
from proxy.scheduling.capacity.pools import Pools
from proxy.scheduling.fitting import Fit, NoFit, fit
from proxy.scheduling.place import Decision, Policy, Reject, Wait
from proxy.scheduling.route import LaneName, Route, lane_of, route
from proxy.scheduling.view import (
    NO_ADAPTERS,
    AdapterView,
    CachedPrefixes,
    NothingKnown,
    RequestShape,
    Role,
    WorkerFacts,
)
from proxy.scheduling.waiting.admission import QUEUE_CAUTION, judge, retry_after_s
from proxy.scheduling.waiting.backlog import Backlog
from proxy.scheduling.waiting.fair_queue import Entry
from proxy.scheduling.waiting.lane import Lane


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in the queue."""

    entry: Entry
    way: Route
    lane: LaneName
    cached: Mapping[str, int]
    """Tokens of its prompt that workers have."""
    looked_s: float
    """When that was looked up."""
    joined_s: float
    """When it began to wait for what it waits for."""

    def is_late(self, now_s: float, timeout_s: float, absent_s: float) -> bool:
        """Whether it has waited too long for room, or for somebody to come."""
        if self.lane == "nobody":
            return now_s >= self.joined_s + absent_s
        return now_s >= self.entry.since_s + timeout_s


PATIENCE_S = 5.0
"""How long smaller requests may pass one that waits for room at a decode worker."""
LACKS_PREFILL = ("no_prefill_worker", "no_compatible_pair")
LOOK_AGAIN_S = 0.5
"""Finding a long prompt in the index takes longer than placing it."""


class Scheduler:
    """Made once per cluster. The time that methods take does not depend on the number of requests.

    Exceptions are `expire` and pool changes.
    """

    def __init__(self, policy: Policy, prefixes: CachedPrefixes | None = None) -> None:
        self.books = Books(Pools(policy))
        self.demand = Demand()
        self._policy = policy
        self._prefixes = prefixes if prefixes is not None else NothingKnown()
        self._waiting: dict[str, _Waiting] = {}
        self._lanes: dict[LaneName, Lane] = {"prefill": Lane(), "decode": Lane()}
        self._backlog = Backlog()
        self._fresh: dict[str, None] = {}
        """Added or taken out of a place since the last `place`."""
        self._refused: list[Decision] = []
        self._seq = 0
        self._full: Mapping[LaneName, str] = {}
        """Why the heads of the lanes could not be placed when that was tried last."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def queued_prefill_s(self) -> float:
        """What a prefill worker alone would compute on the prompts that wait for one."""
        return self._lanes["prefill"].work_s

    @property
    def num_waiting_for_decode(self) -> int:
        """Requests that could be computed now if a decode worker had room for them."""
        pools = self.books.pools
        idle = sum(not worker.jobs for worker in pools.prefill.values())
        full = {name: self._lanes[name].count for name, reason in self._full.items() if reason == "decode_full"}
        return full.get("decode", 0) + min(idle, full.get("prefill", 0))

    # ------------------------------------------------------------------------------------------------- requests

    def add(self, request_id: str, shape: RequestShape, arrived_s: float, now_s: float) -> None:
        """Takes a request into the queue; `place` says what becomes of it.

        `arrived_s`: when the client sent it, which its deadline counts from. Raises `ValueError` if it is here already.
        """
        if request_id in self._waiting or request_id in self.books.held:
            raise ValueError(f"request {request_id} was added twice; remove it first")
        pools = self.books.pools
        prefill_s = pools.average.prefill_s(shape.num_prompt_tokens)
        share_s = prefill_s + pools.average.token_s * self.books.lengths.expected(shape.max_tokens)
        deadline_s = arrived_s + shape.standing.slo.ttft_s
        self._seq += 1
        entry = Entry(request_id, shape, self._seq, arrived_s, now_s, deadline_s, prefill_s, share_s)
        self.demand.arrived(shape.standing.slo, shape.num_prompt_tokens)
        self._enqueue(entry, now_s)
        if request_id in self._waiting:
            self._fresh[request_id] = None

    def follow(self, request_id: str, shape: RequestShape, worker_id: str, now_s: float) -> bool:
        """A sibling that never was in the queue goes where its prompt is; False if there is no room for it now."""
        return self.books.follow(request_id, shape, worker_id, now_s)

    def remove(self, request_id: str, now_s: float, num_output_tokens: int | None = None) -> None:
        """A request has ended or was lost; nothing of it counts any more. Unknown ones are ignored.

        `num_output_tokens`: the length of its answer, if that ended by itself.
        """
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._leave(waiting, now_s, served=False)
        self.books.release(request_id, now_s)
        if num_output_tokens is not None:
            self.books.lengths.observe(num_output_tokens)

    def complete(self, request_id: str, now_s: float) -> bool:
        """The prompt of a placed request has been computed; True if that is news."""
        return self.books.prompt_computed(request_id, now_s)

    def give_up_prefill(self, request_id: str, now_s: float) -> bool:
        """The prefill of a placed request has ended, and not with its prompt; True if that is news."""
        return self.books.prefill_given_up(request_id, now_s)

    def expire(self, now_s: float, timeout_s: float, absent_s: float | None = None) -> list[str]:
        """Takes out whoever has been in the queue for `timeout_s`, or for `absent_s` while nobody could have taken it.

        Looks at everybody: not to be called for each request.
        """
        absent_s = timeout_s if absent_s is None else absent_s
        late = [w for w in self._waiting.values() if w.is_late(now_s, timeout_s, absent_s)]
        for waiting in late:
            self._leave(waiting, now_s, served=False)
        return [waiting.entry.request_id for waiting in late]

    # -------------------------------------------------------------------------------------------------- workers

    def observe_pools(
        self,
        workers: Iterable[WorkerFacts],
        compatible: frozenset[tuple[str, str]],
        now_s: float,
        awaited: frozenset[Role] = frozenset(),
        adapters: AdapterView = NO_ADAPTERS,
    ) -> None:
        """Everyone who takes requests now, and the layouts that differ and fit; whoever waits may go another way.

        `awaited`: roles of which workers will come or come back, so that waiting for them pays. `adapters`: who has
        which of them.
        """
        if not self.books.pools.become(workers, compatible, awaited, adapters):
            return
        for waiting in list(self._waiting.values()):
            way = route(waiting.entry.shape, self.books.pools, waiting.cached)
            if lane_of(way) == waiting.lane and not isinstance(way, Reject):
                # Where workers come and go, who waits for another kind still waits since then.
                waiting.way = way
                continue
            self._leave(waiting, now_s, served=False)
            # Looking every prompt up again would hold up everything.
            self._enqueue(replace(waiting.entry, waiting=True), now_s, way, waiting)

    def observe_load(self, worker_id: str, blocks_used: int, blocks_total: int) -> None:
        """A worker says how many KV blocks it has and how many are taken."""
        self.books.report(worker_id, blocks_used, blocks_total)

    def observe_step(self, worker_id: str, now_s: float, *, goes_on: bool) -> None:
        """Outputs of one step of a decode worker; `goes_on`: also of requests that had one in the step before."""
        self.books.stepped(worker_id, now_s, goes_on=goes_on)

    # ------------------------------------------------------------------------------------------------- deciding

    def place(self, now_s: float) -> list[Decision]:
        """Everything that can be decided now. Each request that was added is answered: with a place, a refusal, or
        (once, if it stays in the queue) with why it waits."""
        decisions, self._refused = self._refused, []
        full: dict[LaneName, str] = {}
        while (waiting := self._next(now_s, full)) is not None:
            self._attempt(waiting, now_s, full, decisions)
        for request_id in self._fresh:
            newcomer = self._waiting.get(request_id)
            if newcomer is not None:
                self._settle(newcomer, now_s, full, decisions)
        self._fresh.clear()
        self._full = full
        # Some may have been refused meanwhile, because their way was chosen again.
        decisions, self._refused = decisions + self._refused, []
        return decisions

    def _next(self, now_s: float, full: Mapping[LaneName, str]) -> _Waiting | None:
        heads = {name: head for name, lane in self._lanes.items() if (head := lane.head(now_s)) is not None}
        # Who needs more room than becomes free at once is passed by smaller ones for a while, not for ever.
        large = [
            heads[name]
            for name, reason in full.items()
            if reason == "decode_full" and name in heads and now_s >= heads[name].since_s + PATIENCE_S
        ]
        open_ = [
            head
            for name, head in heads.items()
            if name not in full and (self._lanes[name].favours(head) or all(head.seq < other.seq for other in large))
        ]
        if not open_:
            return None
        return self._waiting[min(open_, key=lambda head: (head.rank, head.key)).request_id]

    def _attempt(self, waiting: _Waiting, now_s: float, full: dict[LaneName, str], decisions: list[Decision]) -> None:
        """Places the next one of a lane, or finds out why that is not possible and notes it in `full`."""
        entry = waiting.entry
        found = self._fit(waiting, self._cached(waiting, now_s), now_s)
        if isinstance(found, NoFit) and found.reroute:
            self._leave(waiting, now_s, served=False)
            self._enqueue(replace(entry, waiting=True), now_s, route(entry.shape, self.books.pools, {}))
            return
        caution = self.books.caution.of(entry.shape.standing.slo.name)
        if self._too_late(waiting, found.first_token_in_s, found.alone_s, caution, now_s, decisions):
            return
        if isinstance(found, NoFit):
            full[waiting.lane] = found.reason
            return
        self._take(waiting, found, now_s, decisions)

    def _fit(self, waiting: _Waiting, cached: Mapping[str, int], now_s: float) -> Fit | NoFit:
        caution = self._queue_caution(waiting.entry)
        return fit(self.books.pools, self.books.lengths, waiting.way, waiting.entry, cached, now_s, caution)

    def _queue_caution(self, entry: Entry) -> float:
        """By how much predictions are stretched for those who might wait."""
        return max(QUEUE_CAUTION, self.books.caution.of(entry.shape.standing.slo.name))

    def _take(self, waiting: _Waiting, found: Fit, now_s: float, decisions: list[Decision]) -> None:
        entry = waiting.entry
        self._leave(waiting, now_s, served=True)
        self.books.charge(entry, found, now_s)
        self.demand.placed(entry.work_s, _for_prefill_workers(entry, found))
        decisions.append(Decision(entry.request_id, found.placement, entry.demoted))

    def _settle(
        self, newcomer: _Waiting, now_s: float, full: Mapping[LaneName, str], decisions: list[Decision]
    ) -> None:
        """Somebody new could not be placed: is there hope, is there room to wait?"""
        entry, lane = newcomer.entry, self._lanes.get(newcomer.lane)
        wait_s = 0.0
        if lane is not None:
            pools = self.books.pools
            workers = len(pools.prefill) if newcomer.lane == "prefill" else len(pools.decode)
            wait_s = lane.wait_s(entry, workers)
            found = self._fit(newcomer, newcomer.cached, now_s)
            if isinstance(found, Fit) and found.overflow:
                # It takes nothing of what those before it wait for.
                self._take(newcomer, found, now_s, decisions)
                return
            in_s = wait_s + found.first_token_in_s
            if self._too_late(newcomer, in_s, found.alone_s, self._queue_caution(entry), now_s, decisions):
                demoted = self._waiting.get(entry.request_id)
                if demoted is None:
                    return
                newcomer, entry = demoted, demoted.entry
        if not entry.shape.promised and self._backlog.count > self._policy.max_queued_requests:
            leaving = self._waiting[self._backlog.surplus(entry)]
            self._leave(leaving, now_s, served=False)
            message = f"{self._policy.max_queued_requests} requests are waiting already; try again later."
            full_up = Reject(429, "queue_full", message, retry_after_s(wait_s))
            decisions.append(Decision(leaving.entry.request_id, full_up))
            if leaving is newcomer:
                return
        reason = newcomer.way.reason if lane is None else full.get(newcomer.lane, "decode_full")
        decisions.append(Decision(entry.request_id, Wait(reason), entry.demoted))

    def _too_late(
        self, waiting: _Waiting, in_s: float, alone_s: float, caution: float, now_s: float, decisions: list[Decision]
    ) -> bool:
        """Refuses or demotes a request that cannot be in time; False if it stays where it is."""
        entry = waiting.entry
        if in_s <= alone_s and not self.books.pools.average.is_learned:
            # Nobody is before it: only by computing it can one find out how long that takes.
            return False
        verdict = judge(entry, in_s, alone_s, caution, now_s)
        if verdict is None:
            return False
        self._leave(waiting, now_s, served=False)
        if isinstance(verdict, Reject):
            decisions.append(Decision(entry.request_id, verdict))
        else:
            self._enqueue(replace(entry, demoted=True, waiting=True), now_s, waiting.way, waiting)
        return True

    # ---------------------------------------------------------------------------------------------- bookkeeping

    def _enqueue(self, entry: Entry, now_s: float, way: Route | None = None, before: _Waiting | None = None) -> None:
        """`before`: how it waited until now, if its prompt need not be looked up again."""
        cached, looked_s = (
            (before.cached, before.looked_s) if before is not None else (self._look_up(entry.shape), now_s)
        )
        way = way if way is not None else route(entry.shape, self.books.pools, cached)
        if isinstance(way, Reject):
            self._refused.append(Decision(entry.request_id, way))
            return
        waiting = _Waiting(entry, way, lane_of(way), cached, looked_s, now_s)
        self._waiting[entry.request_id] = waiting
        self._backlog.add(entry)
        if waiting.lane != "nobody":
            self._lanes[waiting.lane].push(entry)

    def _leave(self, waiting: _Waiting, now_s: float, *, served: bool) -> None:
        entry = waiting.entry
        del self._waiting[entry.request_id]
        self._backlog.remove(entry)
        if served:
            for lane in self._lanes.values():
                lane.served(entry, now_s)
        if waiting.lane != "nobody":
            self._lanes[waiting.lane].remove(entry, now_s, served=served)

    def _cached(self, waiting: _Waiting, now_s: float) -> Mapping[str, int]:
        if now_s - waiting.looked_s >= LOOK_AGAIN_S:
            waiting.cached, waiting.looked_s = self._look_up(waiting.entry.shape), now_s
        return waiting.cached

    def _look_up(self, shape: RequestShape) -> Mapping[str, int]:
        return self._prefixes.cached_tokens(shape.prompt_hashes) if shape.prompt_hashes else {}


def _for_prefill_workers(entry: Entry, found: Fit) -> float:
    """Seconds of a prompt that a prefill worker computes, or would if there were one for it."""
    if found.job is not None:
        return found.job.seconds
    return entry.work_s if found.overflow or found.placement.reason in LACKS_PREFILL else 0.0
