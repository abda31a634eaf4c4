"""A simulated cluster whose size the proxy's real controller decides, and the day that it is put through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import simpy

from cluster.config import ROLES
from lab.load.client import Record
from lab.load.plan import Session, plan_sessions
from lab.load.work import WorkClass
from lab.simulator.cluster import Outcome, Rules, SimulatedCluster
from lab.simulator.costs import Costs
from proxy.scaling.autoscaler import Autoscaler
from proxy.scaling.look import PoolSize
from proxy.scaling.observe import look_at
from proxy.scaling.rules import ScalingRules
from proxy.scheduling.view import Role


@dataclass(frozen=True)
class Phase:
    """A part of the day with a constant rate of requests."""

    rate_per_s: float
    seconds: float
    name: str = ""


def day_sessions(work: WorkClass, phases: Sequence[Phase], seed: int, cv: float = 1.0) -> list[Session]:
    """Every request of a day. `cv`: of the times between arrivals; 1 is a Poisson process, less is more even."""
    sessions: list[Session] = []
    start_s = 0.0
    for number, phase in enumerate(phases):
        part = replace(work, rate_per_s=phase.rate_per_s)
        for session in plan_sessions([part], phase.seconds, seed + 1000 * number, "gamma", cv):
            sessions.append(replace(session, start_s=start_s + session.start_s, number=len(sessions)))
        start_s += phase.seconds
    return sessions


def attained(records: Sequence[Record], works: Mapping[str, WorkClass]) -> float:
    """Share of requests that came whole and within both targets, as the proxy counts it."""
    good = 0
    for record in records:
        work = works[record.work]
        in_time = record.ttft_s is not None and record.ttft_s <= (work.ttft_s or inf)
        long = sum(gap_s > (work.itl_s or inf) for gap_s in record.gaps_s)
        good += not record.error and in_time and 100 * long <= len(record.gaps_s)
    return good / max(1, len(records))


@dataclass(frozen=True)
class Change:
    """A pool got another size."""

    at_s: float
    role: Role
    count: int
    """Workers, with those that are still coming."""
    reason: str


@dataclass
class _Shift:
    """A worker from the order to start it until it is gone."""

    role: Role
    from_s: float
    to_s: float | None = None


@dataclass
class Governed:
    """What a governed run gave."""

    outcome: Outcome
    worker_s: float
    """Over all workers, from the order to start each until it has left."""
    attained: float
    """Share of all requests that came whole, within both targets; of their gaps one of a hundred may be longer."""
    changes: list[Change] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)


class GovernedCluster(SimulatedCluster):
    """Grows and shrinks as `Autoscaler` says; a new worker serves after `start_s`."""

    def __init__(
        self,
        costs: Costs,
        num_prefill: int,
        num_decode: int,
        rules: Rules,
        classes: Sequence[WorkClass],
        scaling: ScalingRules,
        start_s: float,
    ) -> None:
        self._shifts: dict[str, _Shift] = {}
        self._coming: dict[str, Role] = {}
        self._becoming: dict[str, Role] = {}
        """Workers that drain to serve in the other role."""
        super().__init__(costs, num_prefill, num_decode, rules, classes)
        self._works = {work.name: work for work in classes}
        self._scaling, self._start_s = scaling, start_s
        self._autoscaler = Autoscaler(scaling)
        self._next: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
        self._changes: list[Change] = []
        self._warnings: set[str] = set()

    def govern(self, sessions: Sequence[Session], until_s: float) -> Governed:
        """A day that ends at `until_s`; what is not answered then still is."""
        self._until_s = until_s
        outcome = self.run(sessions)
        end_s = max(until_s, outcome.seconds)
        worker_s = sum((until_s if s.to_s is None else min(s.to_s, end_s)) - s.from_s for s in self._shifts.values())
        return Governed(outcome, worker_s, attained(outcome.records, self._works), self._changes, self._warnings)

    def _begin(self) -> None:
        self._env.process(self._govern())

    def _start(self, worker_id: str, role: Role) -> None:
        self._shifts.setdefault(worker_id, _Shift(role, self._env.now))
        super()._start(worker_id, role)

    def _govern(self) -> simpy.events.ProcessGenerator:
        every_s = self._scaling.every_s
        while self._env.now < self._until_s:
            yield self._env.timeout(every_s)
            decision = self._autoscaler.decide(look_at(self._scheduler, self.meter.take(), self._sizes(), every_s))
            self._warnings.update(decision.warnings)
            before = self._sizes()
            self._convert(decision.convert)
            for role in ROLES:
                self._resize(role, decision.want[role])
            for role in ROLES:
                if (count := self._sizes()[role].count) != before[role].count:
                    self._changes.append(Change(self._env.now, role, count, "; ".join(decision.reasons)))
            self._tell_pools()
            self._finish_draining()
            self._settle()

    def _serving(self, role: Role) -> list[str]:
        pool = self._prefill if role == "prefill" else self._decode
        return [worker_id for worker_id in pool if worker_id not in self._draining]

    def _sizes(self) -> dict[Role, PoolSize]:
        coming = [*self._coming.values(), *self._becoming.values()]
        return {role: PoolSize(len(self._serving(role)), coming.count(role)) for role in ROLES}

    def _least_busy(self, role: Role, count: int) -> list[str]:
        return sorted(self._serving(role), key=self._carries)[: max(0, count)]

    def _convert(self, count: int) -> None:
        source: Role = "prefill" if count > 0 else "decode"
        for worker_id in self._least_busy(source, abs(count)):
            self._becoming[worker_id] = "decode" if count > 0 else "prefill"
            self._draining.add(worker_id)

    def _resize(self, role: Role, want: int) -> None:
        surplus = self._sizes()[role].count - want
        for _ in range(-surplus):
            worker_id = f"{role}-{self._next[role]}"
            self._next[role] += 1
            self._coming[worker_id] = role
            self._shifts[worker_id] = _Shift(role, self._env.now)
            self._env.process(self._come(worker_id, role))
        for worker_id in [name for name, pool in self._coming.items() if pool == role][: max(0, surplus)]:
            del self._coming[worker_id]
            self._shifts[worker_id].to_s = self._env.now
            surplus -= 1
        self._draining.update(self._least_busy(role, surplus))

    def _come(self, worker_id: str, role: Role) -> simpy.events.ProcessGenerator:
        yield self._env.timeout(self._start_s)
        if self._coming.pop(worker_id, None) is None:
            return  # nobody wants it any more
        self._start(worker_id, role)
        self._tell_pools()
        self._settle()

    def _drained(self, worker_id: str) -> None:
        role = self._becoming.pop(worker_id, None)
        if role is None:
            self._shifts[worker_id].to_s = self._env.now
        else:
            self._start(worker_id, role)
            self._tell_pools()
