"""A whole cluster in simulated time: the proxy's scheduler decides, simulated workers take their time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import simpy

from lab.load.client import Record
from lab.load.plan import Session
from lab.load.work import WorkClass
from lab.simulator.costs import Costs, StepTimes
from lab.simulator.request import Request, record_of
from lab.simulator.workers import DecodeWorker, PrefillWorker, PrefixCaches
from proxy.scaling.meter import Meter
from proxy.scaling.observe import prompt_alone_s
from proxy.scheduling.place import Decision, Local, Policy, PrefillOnly, Reject, Remote
from proxy.scheduling.prompt_hashes import PromptHashes
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.slo import OverloadPolicy, SloClass, Standing, made_to_yield
from proxy.scheduling.view import RequestShape, Role, WorkerFacts

_BLOCK_TOKENS = 16
_BEAT_S = 1.0
_NO_LIMIT_S = 1e6


class BlockNames(PromptHashes):
    """A prompt known by the ids of its blocks, as traces give them."""

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.block_ids = block_ids

    def __bool__(self) -> bool:
        return bool(self.block_ids)


@dataclass(frozen=True)
class Incident:
    """A worker dies, or comes (back), at a time."""

    at_s: float
    worker_id: str
    comes: bool = False


@dataclass(frozen=True)
class Rules:
    """What the operator decided."""

    on_overload: OverloadPolicy = "queue"
    queue_timeout_s: float = 60.0
    max_queued_requests: int = 10_000
    remote_prefill_min_tokens: int = 512
    chunk_tokens: int = 8192
    local_chunk_tokens: int = 256
    """Of prompts that decode workers compute, beside their streams."""
    bounded_caches: bool = True
    """Prefill workers remember the prompts for which they have memory; False: all of them."""


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    records: list[Record]
    seconds: float
    """Simulated."""
    prefill_use: float
    """Share of the time that prefill workers computed."""
    decode_use: float
    mean_batch: float
    """Sequences per decode step."""
    found_cached: float
    """Of the prompts' blocks, those that the chosen prefill workers had, where the load tells of any."""
    continued: int
    """Streams carried over the death of a worker."""


class SimulatedCluster:
    """Made for one run."""

    def __init__(
        self, costs: Costs, num_prefill: int, num_decode: int, rules: Rules, classes: Sequence[WorkClass]
    ) -> None:
        self._env = simpy.Environment()
        self._costs, self._rules = costs, rules
        self._steps: dict[Role, StepTimes] = {"prefill": costs.steps("prefill"), "decode": costs.steps("decode")}
        limits = (
            SloClass(work.name, work.ttft_s or _NO_LIMIT_S, work.itl_s or _NO_LIMIT_S, rules.on_overload)
            for work in classes
        )
        self._standings = {slo.name: Standing(slo) for slo in made_to_yield(limits)}
        self._caches = PrefixCaches(max(1, self._steps["prefill"].kv_tokens) if rules.bounded_caches else None)
        policy = Policy(
            rules.remote_prefill_min_tokens,
            "local",
            rules.max_queued_requests,
            prior_prefill_tokens_per_s=2048 / self._steps["prefill"].prefill_s(2048, rules.chunk_tokens),
            prior_decode_step_s=self._steps["decode"].step_s(8, 1000),
        )
        self._scheduler = Scheduler(policy, self._caches)
        self._prefill: dict[str, PrefillWorker] = {}
        self._decode: dict[str, DecodeWorker] = {}
        self._gone: list[PrefillWorker | DecodeWorker] = []
        self._open: dict[str, Request] = {}
        self._all: list[Request] = []
        self._decode_tokens = 0
        self.meter = Meter()
        self._draining: set[str] = set()
        """Workers that get nothing new."""
        self._num_blocks = self._num_cached = 0
        self.continued = 0
        for index in range(num_prefill):
            self._start(f"prefill-{index}", "prefill")
        for index in range(num_decode):
            self._start(f"decode-{index}", "decode")
        self._tell_pools()

    def run(self, sessions: Iterable[Session], incidents: Sequence[Incident] = (), until_s: float = 1e9) -> Outcome:
        """Sends the first turn of every session; returns when all requests have ended, or at `until_s`."""
        sessions = sorted(sessions, key=lambda session: session.start_s)
        self._env.process(self._arrive(sessions))
        self._env.process(self._beat(sessions[-1].start_s if sessions else 0.0))
        for incident in incidents:
            self._env.process(self._happen(incident))
        self._begin()
        self._env.run(until=until_s)
        for request in list(self._open.values()):
            self._end(request, 0, "cut off")
        end_s = max((r.last_s for r in self._all), default=0.0) or 1e-9
        prefill = [w for w in (*self._prefill.values(), *self._gone) if isinstance(w, PrefillWorker)]
        decode = [w for w in (*self._decode.values(), *self._gone) if isinstance(w, DecodeWorker)]
        steps = sum(worker.num_steps for worker in decode)
        return Outcome(
            records=[record_of(request, self._costs.first_token_s) for request in self._all],
            seconds=end_s,
            prefill_use=sum(w.busy_s for w in prefill) / (end_s * max(1, len(self._prefill))),
            decode_use=sum(w.busy_s for w in decode) / (end_s * max(1, len(self._decode))),
            mean_batch=self._decode_tokens / steps if steps else 0.0,
            found_cached=self._num_cached / self._num_blocks if self._num_blocks else 0.0,
            continued=self.continued,
        )

    def _begin(self) -> None:
        """For what else is to happen in a run."""

    def fits(self, num_tokens: int) -> bool:
        """A request of so many tokens has room at a worker of either kind."""
        return min(steps.kv_tokens for steps in self._steps.values()) > num_tokens

    # ------------------------------------------------------------------------------------------ what happens

    def _arrive(self, sessions: Sequence[Session]) -> simpy.events.ProcessGenerator:
        for session in sessions:
            yield self._env.timeout(max(0.0, session.start_s - self._env.now))
            turn = session.turns[0]
            num_tokens = sum(piece.num_tokens for piece in turn.pieces)
            shared = turn.pieces[:-1]
            names = tuple(piece.seed for piece in shared)
            block_tokens = shared[0].num_tokens if shared else 0
            shape = RequestShape(
                num_tokens,
                turn.output_tokens,
                first_token_mode=True,
                standing=self._standings[session.work],
                prompt_hashes=BlockNames(names),
            )
            request = Request(
                f"{session.work}-{session.number}", session.work, shape, turn.output_tokens, names, block_tokens,
                self._env.now,
            )  # fmt: skip
            self._all.append(request)
            self._open[request.request_id] = request
            self._scheduler.add(request.request_id, shape, self._env.now, self._env.now)
            self._settle()

    def _beat(self, last_arrival_s: float) -> simpy.events.ProcessGenerator:
        while self._open or self._env.now <= last_arrival_s:
            yield self._env.timeout(_BEAT_S)
            for request_id in self._scheduler.expire(self._env.now, self._rules.queue_timeout_s):
                self._end(self._open[request_id], 504, "504: queued for too long")
            for worker in self._decode.values():
                facts = self._facts(worker.worker_id)
                used = -(-worker.kv_tokens // facts.block_size)
                self._scheduler.observe_load(worker.worker_id, min(used, facts.num_blocks), facts.num_blocks)
            self._settle()

    def _happen(self, incident: Incident) -> simpy.events.ProcessGenerator:
        yield self._env.timeout(incident.at_s)
        if incident.comes:
            self._start(incident.worker_id, "prefill" if incident.worker_id.startswith("prefill") else "decode")
            self._tell_pools()
        else:
            self._die(incident.worker_id)
        self._settle()

    def _die(self, worker_id: str) -> None:
        worker = self._prefill.pop(worker_id, None) or self._decode.pop(worker_id, None)
        if worker is None:
            return
        self._gone.append(worker)
        self._caches.forget(worker_id)
        self._tell_pools()
        worker.drop_all()
        for request in list(self._open.values()):
            if request.decode == worker_id or (request.prefill == worker_id and request.ttft_s is None):
                self._again(request)

    def _again(self, request: Request) -> None:
        """As the proxy does: prompt and tokens sent become a new prompt."""
        self._scheduler.remove(request.request_id, self._env.now)
        request.places += 1
        request.prefill = request.decode = ""
        for prefilling in self._prefill.values():
            prefilling.leave(request)
        for decoding in self._decode.values():
            decoding.leave(request)
        self.continued += bool(request.sent_tokens)
        shape = replace(
            request.shape,
            num_prompt_tokens=request.shape.num_prompt_tokens + request.sent_tokens,
            max_tokens=max(1, request.output_tokens - request.sent_tokens),
            continues=bool(request.sent_tokens),
        )
        self._scheduler.add(request.request_id, shape, request.arrived_s, self._env.now)

    # ---------------------------------------------------------------------------------- what the proxy would do

    def _settle(self) -> None:
        for decision in self._scheduler.place(self._env.now):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        request = self._open[decision.request_id]
        match decision.placement:
            case Remote(prefill, decode, _):
                request.prefill, request.decode = prefill, decode
                self._prefill[prefill].submit(request, self._found(request, prefill), decision.demoted)
            case PrefillOnly(prefill, _):
                request.prefill = prefill
                self._prefill[prefill].submit(request, self._found(request, prefill), decision.demoted)
            case Local(decode, _):
                request.decode = decode
                self._num_blocks += len(request.block_ids)
                self._decode[decode].submit(request, 0)
            case Reject(status, reason, _):
                self._end(request, status, f"{status}: {reason}")

    def _found(self, request: Request, worker_id: str) -> int:
        """Tokens of its prompt that a prefill worker has cached."""
        tokens = self._caches.cached_tokens(request.shape.prompt_hashes).get(worker_id, 0)
        if request.block_ids:
            self._num_blocks += len(request.block_ids)
            self._num_cached += round(tokens / request.block_tokens)
        return min(tokens, request.shape.num_prompt_tokens)

    def _prefilled(self, request: Request, last_chunk_tokens: int) -> None:
        """The client has its token at once; decoding begins when the last chunk's KV has moved."""
        if request.request_id not in self._open:
            return
        if request.block_ids:
            self._caches.store(request.prefill, request.block_ids, request.block_tokens)
        request.token(self._env.now)
        self._began(request)
        self._scheduler.complete(request.request_id, self._env.now)
        if request.finished:
            self._end(request, 200, "")
        else:
            self._env.process(self._hand_over(request, last_chunk_tokens))
        self._finish_draining()
        self._settle()

    def _began(self, request: Request) -> None:
        if len(request.gaps_s) == 0 and request.ttft_s is not None:
            alone_s = prompt_alone_s(self._scheduler, request.shape.num_prompt_tokens)
            self.meter.first_token(request.ttft_s, request.shape.standing.slo.ttft_s, alone_s)

    def _hand_over(self, request: Request, num_tokens: int) -> simpy.events.ProcessGenerator:
        place = request.places
        yield self._env.timeout(self._costs.transfer_s(num_tokens))
        worker = self._decode.get(request.decode)
        if request.places == place and request.request_id in self._open and worker is not None:
            worker.join(request)

    def _decoded(self, request: Request, worker: DecodeWorker) -> None:
        self._decode_tokens += 1
        if request.sent_tokens == 1:
            self._began(request)
            self._scheduler.complete(request.request_id, self._env.now)
            self._settle()
        if request.finished:
            self._end(request, 200, "")
            self._finish_draining()
            self._settle()

    def _stepped(self, worker: DecodeWorker, goes_on: bool) -> None:
        self._scheduler.observe_step(worker.worker_id, self._env.now, goes_on=goes_on)

    def _end(self, request: Request, status: int, error: str) -> None:
        request.status, request.error = status, error
        self._open.pop(request.request_id, None)
        self._scheduler.remove(request.request_id, self._env.now, None if error else request.output_tokens)
        request.last_s = self._env.now
        if error:
            self.meter.turned_away()
        else:
            slo = request.shape.standing.slo
            self.meter.stream(uneven=100 * sum(gap > slo.itl_s for gap in request.gaps_s) > len(request.gaps_s))

    def _finish_draining(self) -> None:
        for worker_id in [worker_id for worker_id in self._draining if not self._carries(worker_id)]:
            self._draining.discard(worker_id)
            worker = self._prefill.pop(worker_id, None) or self._decode.pop(worker_id)
            self._gone.append(worker)
            self._caches.forget(worker_id)
            self._drained(worker_id)

    def _drained(self, worker_id: str) -> None:
        """It has finished what it had, and is gone."""

    def _carries(self, worker_id: str) -> int:
        """Requests that a worker still has something to do for."""
        if worker_id in self._prefill:
            return self._prefill[worker_id].num_jobs
        return sum(request.decode == worker_id for request in self._open.values())

    # ------------------------------------------------------------------------------------------------- workers

    def _start(self, worker_id: str, role: Role) -> None:
        if role == "prefill":
            self._prefill[worker_id] = PrefillWorker(
                self._env, worker_id, self._steps["prefill"], self._rules.chunk_tokens, self._prefilled
            )
        else:
            self._decode[worker_id] = DecodeWorker(
                self._env, worker_id, self._steps["decode"], self._rules.local_chunk_tokens, self._decoded,
                self._stepped, holds_itl=True,
            )  # fmt: skip

    def _facts(self, worker_id: str) -> WorkerFacts:
        role: Role = "prefill" if worker_id in self._prefill else "decode"
        steps = self._steps[role]
        return WorkerFacts(
            worker_id=worker_id,
            role=role,
            epoch=str(id(self._prefill.get(worker_id) or self._decode.get(worker_id))),
            index=int(worker_id.rpartition("-")[2]) * 2 + worker_id.startswith("decode"),
            fingerprint="simulated",
            max_model_len=self._costs.max_model_len,
            block_size=_BLOCK_TOKENS,
            num_blocks=steps.kv_tokens // _BLOCK_TOKENS,
            max_num_seqs=512,
            max_num_batched_tokens=self._rules.chunk_tokens,
        )

    def _tell_pools(self) -> None:
        serving = (worker_id for worker_id in (*self._prefill, *self._decode) if worker_id not in self._draining)
        facts = [self._facts(worker_id) for worker_id in serving]
        self._scheduler.observe_pools(facts, frozenset(), self._env.now)
