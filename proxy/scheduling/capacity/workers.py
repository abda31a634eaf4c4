"""What each worker has been given, and what that leaves room for."""

from dataclasses import dataclass, field
from math import ceil, exp, inf, sqrt

from proxy.scheduling.capacity.costs import CostModel, Work
from proxy.scheduling.view import WorkerFacts

BUDGETS_AHEAD = 2
"""Chunk budgets of prompt tokens that may lie before a request when it is sent to a prefill worker."""
SAMPLE_TIMES = 4
"""A worker that is never idle is sampled when it has ended so many times the work of the longest prompt that it still
has: how much of that one is done is unknown."""
STEP_PART = 0.8
"""Part of the target for gaps that a step with a chunk is planned to take; the engine allows a little more."""
LEAST_SHARE = 0.25
"""Where a chunk would get less of such a step than this, decoding is too near its target to be slowed down."""
RECENT_S = 60.0
"""How far back the work of a worker counts when the pool is kept in balance."""

Urgency = tuple[tuple[int, int], float]
"""Rank and deadline; lower goes first, in the engine as in the proxy's queue."""


@dataclass(slots=True)
class Recent:
    """Seconds of work begun of late; what lies further back counts less."""

    work_s: float = 0.0
    squares: float = 0.0
    """Of the pieces, each counting as it does in `work_s`."""
    at_s: float = 0.0

    def now(self, now_s: float) -> float:
        """What counts now."""
        return self.work_s * self._left(now_s) if self.work_s else 0.0

    def chance_s(self, now_s: float) -> float:
        """Standard error of `now`, for work that comes in independent pieces: few long prompts tell little."""
        return sqrt(self.squares) * self._left(now_s) if self.work_s else 0.0

    def add(self, work_s: float, now_s: float) -> None:
        """Work is begun."""
        left = self._left(now_s)
        self.work_s, self.squares = self.work_s * left + work_s, self.squares * left * left + work_s * work_s
        self.at_s = now_s

    def _left(self, now_s: float) -> float:
        return exp((self.at_s - now_s) / RECENT_S)


@dataclass(slots=True)
class Job:
    """A prefill that was sent to a worker and has not ended."""

    urgency: Urgency
    work: Work
    seconds: float
    """By the worker's cost model when it was sent."""
    longest_step_s: float = inf
    """Of the steps on it, if it is in time."""


@dataclass(slots=True, eq=False)
class PrefillWorker:
    """One life of a prefill worker."""

    facts: WorkerFacts
    costs: CostModel
    jobs: dict[str, Job] = field(default_factory=dict)
    work_s: float = 0.0
    """Of all jobs."""
    since_s: float = 0.0
    """When the job that is computed now was begun, as far as one can tell."""
    listed: tuple[bool, float, int] = (False, 0.0, 0)
    """Under which it stands in the order of its pool."""
    recent: Recent = field(default_factory=Recent)
    _sampled_from_s: float = 0.0
    _sample: Work = field(default_factory=Work)
    _sample_s: float = 0.0
    """By the cost model."""

    @property
    def order(self) -> tuple[bool, float, int]:
        """Idle ones first, the longest idle of them; then who will have done everything first; and its number."""
        return (bool(self.jobs), self.since_s + self.work_s if self.jobs else self.since_s, self.facts.index)

    def begin(self, request_id: str, job: Job, now_s: float) -> None:
        """Notes a prefill that is sent to it."""
        if not self.jobs:
            self.since_s = self._sampled_from_s = now_s
            self.work_s = 0.0
        self.jobs[request_id] = job
        self.recent.add(job.seconds, now_s)
        self.work_s += job.seconds

    def end(self, request_id: str, now_s: float, *, computed: bool) -> tuple[Work, float] | None:
        """A prefill is over; `computed`: to its end. Returns a sample of this worker's speed when there is one: what
        it did, and in how many seconds."""
        job = self.jobs.pop(request_id, None)
        if job is None:
            return None
        self.work_s = max(0.0, self.work_s - job.seconds) if self.jobs else 0.0
        self.since_s = now_s
        if not computed:
            # How much of it was computed is unknown.
            self._begin_sample(now_s)
            return None
        self._sample += job.work
        self._sample_s += job.seconds
        if self.jobs and self._sample_s < SAMPLE_TIMES * max(other.seconds for other in self.jobs.values()):
            return None
        sample = (self._sample, now_s - self._sampled_from_s)
        self._begin_sample(now_s)
        return sample

    def _begin_sample(self, now_s: float) -> None:
        self._sampled_from_s, self._sample, self._sample_s = now_s, Work(), 0.0

    def queue_for(self, urgency: Urgency, now_s: float) -> "Ahead":
        """What would be computed before a new request of this urgency."""
        seconds, tokens, count, later_step_s = 0.0, 0, 0, 0.0
        for job in self.jobs.values():
            if job.urgency <= urgency:
                seconds += job.seconds
                tokens += job.work.tokens
                count += 1
            else:
                later_step_s = max(later_step_s, job.longest_step_s)
        if seconds:
            seconds = max(0.0, seconds - (now_s - self.since_s))
        elif later_step_s:
            # The chunk that is being computed.
            chunk_s = self.costs.prefill_s(self.facts.max_num_batched_tokens)
            seconds = max(0.0, min(self.work_s, chunk_s, later_step_s))
        return Ahead(seconds, tokens, count)

    def may_end(self, within_s: float, now_s: float) -> bool:
        """Whether one of its prompts may be computed within so many seconds, whichever the engine works on."""
        return bool(self.jobs) and min(job.seconds for job in self.jobs.values()) < now_s - self.since_s + within_s

    def takes(self, ahead: "Ahead") -> bool:
        """Whether a request may be sent with this much before it: about two chunk budgets, and never just one."""
        # One is computed and one is ready, however long they are: the engine never waits for the proxy.
        enough = ahead.requests >= 2 and ahead.tokens >= BUDGETS_AHEAD * self.facts.max_num_batched_tokens
        return not enough and (len(self.jobs) < 2 or self.has_seat)

    @property
    def has_seat(self) -> bool:
        """Its engine runs fewer requests than it may at once."""
        return len(self.jobs) < self.facts.max_num_seqs


@dataclass(slots=True)
class Ahead:
    """What is before a request at a worker."""

    seconds: float
    tokens: int
    requests: int


@dataclass(slots=True, eq=False)
class DecodeWorker:
    """One life of a decode worker. Blocks are its KV blocks."""

    facts: WorkerFacts
    costs: CostModel
    blocks_total: int = 0
    reserved: int = 0
    """Blocks of prompts and expected outputs, of all requests that run here or are on their way."""
    foreign: int = 0
    """Blocks in use beyond those reserved, by the last report."""
    num_requests: int = 0
    """Running and on their way."""
    num_running: int = 0
    """Those whose prompt is computed, or is computed here."""
    local_prefills: int = 0
    """Prompts computed here because prefill workers are busy, that have no token yet."""
    itl_s: float = inf
    """The strictest target of those it carries."""
    listed: tuple[int, int, float, int] = (0, 0, 0.0, 0)
    _last_step_s: float = 0.0

    @property
    def order(self) -> tuple[int, int, float, int]:
        """Free KV in eighths, then the batch, then the time of a step, then its number."""
        taken = 8 * (self.reserved + self.foreign) // max(1, self.blocks_total)
        return (taken, self.num_requests, round(self.costs.step_s, 3), self.facts.index)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // max(1, self.facts.block_size))

    def has_room(self, blocks: int) -> bool:
        """An idle worker takes whatever comes: its engine knows better what fits."""
        if self.num_requests == 0:
            return True
        fits = self.reserved + self.foreign + blocks <= self.blocks_total
        return fits and self.num_running < self.facts.max_num_seqs

    def take(self, blocks: int, itl_s: float, *, running: bool) -> None:
        """A request is on its way here."""
        self.itl_s = min(itl_s, self.itl_s if self.num_requests else itl_s)
        self.reserved += blocks
        self.num_requests += 1
        self.num_running += running

    def give_back(self, blocks: int, *, running: bool) -> None:
        """It has left."""
        self.reserved -= blocks
        self.num_requests -= 1
        self.num_running -= running

    def spare_s(self, itl_s: float) -> float:
        """Computation that fits between two steps if everybody's gap stays within its target; `itl_s`: a newcomer's."""
        if self.num_requests == 0:
            # Whoever comes next meets one gap.
            return 2 * itl_s
        return min(itl_s, self.itl_s) - self.costs.step_s

    def in_chunks_s(self, prefill_s: float, itl_s: float) -> float:
        """When a prompt of `prefill_s` is computed if each step takes as much of it as everybody's target leaves.

        `itl_s`: the newcomer's target. Endless if steps leave nothing.
        """
        if self.num_requests == 0:
            return prefill_s
        longest_s = min(itl_s, self.itl_s) * STEP_PART
        share_s = longest_s - self.costs.step_s
        if share_s < LEAST_SHARE * longest_s:
            return inf
        return ceil(prefill_s / share_s) * longest_s

    def report(self, blocks_used: int, blocks_total: int) -> None:
        """What the engine says it uses."""
        self.blocks_total = blocks_total
        self.foreign = max(0, blocks_used - self.reserved)

    @property
    def was_watched(self) -> bool:
        """The time of its steps is not only a guess."""
        return self._last_step_s > 0

    def stepped(self, now_s: float, *, goes_on: bool) -> None:
        """Outputs of one step came; `goes_on`: some of a request that had an output in the step before."""
        if goes_on and self._last_step_s:
            self.costs.observe_step(now_s - self._last_step_s)
        self._last_step_s = now_s
