"""Decides how many workers each pool shall have. Pure: fed with looks, never asks for the time, acts on nothing.

Proof says when a pool changes. It grows at once when the work that surely arrives needs more workers, or when
clients measurably miss their targets. It shrinks when fewer would surely have been enough over the last `hold_s`, with
a margin, and were too few at no moment of them.

The average says how many workers it gets then: as many as fit what came within `hold_s` and half the margin, between
the two proofs. `hold_s` after a change that average is better known, so the pool takes the size that fits once more.
After that only proof changes it, so at constant load it keeps its size.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt
from typing import NamedTuple

from cluster.config import ROLES
from proxy.scaling.decode_need import BatchCosts, decode_workers, fit_in_memory
from proxy.scaling.load import Level, Load
from proxy.scaling.look import Arrivals, Decision, Look
from proxy.scaling.prefill_need import prefill_workers
from proxy.scaling.rules import ScalingRules
from proxy.scheduling.view import Role

OTHER: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}
CERTAIN = 3.0
"""Standard errors by which misses must exceed what is allowed."""
HELPED = 0.7
"""Another worker helped if no more than this much of the misses is left."""
SAME = 0.75, 1.5
"""Times a load, between which what was learned of it still holds."""
FEWEST = 20
"""Answers that say anything about a share."""
SAMPLES = 256
"""Prompts of a class whose times are remembered."""


class Wants(NamedTuple):
    """By which requests are told apart; in the order in which prefill workers take them. Times in seconds."""

    ttft_s: float
    itl_s: float
    gives_way: bool


@dataclass(slots=True)
class _Class:
    """Requests that want the same, whatever the names of their classes are."""

    load: Load
    service_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    seen_at_s: float = 0.0


@dataclass(slots=True)
class _Misses:
    """Counted while a pool keeps its size."""

    total: int = 0
    missed: int = 0

    def exceed(self, goal: float) -> bool:
        allowed = self.total * (1 - goal)
        return self.total >= FEWEST and self.missed > allowed + CERTAIN * sqrt(max(1.0, allowed * goal))


@dataclass(frozen=True, slots=True)
class _Need:
    """Workers of one pool."""

    late: int
    """For what came within seconds."""
    grow: int
    """For what surely comes: a smaller pool is too small."""
    keep: int
    """For what may still come, with a margin: a larger pool is too large."""
    fit: int
    """For what comes on average, with half the margin: the size of a pool that changes."""

    def or_more(self, late: int, grow: int, keep: int, fit: int) -> "_Need":
        return _Need(max(self.late, late), max(self.grow, grow), max(self.keep, keep), max(self.fit, fit))

    def no_fewer(self, floor: int) -> "_Need":
        return _Need(self.late, max(self.grow, floor), max(self.keep, floor), max(self.fit, floor))


@dataclass(slots=True)
class _Feedback:
    """Clients missed their targets although the computed number of workers was there."""

    floor: int = 0
    """Workers that turned out to be needed, whatever is computed; 0: none."""
    level: float = 0.0
    """Of the load, at the time."""
    share: float = 1.0
    """That missed its target before the last of them came."""
    useless: bool = False
    """More workers did not help."""


@dataclass(slots=True)
class _Pool:
    """What is remembered of one pool."""

    needed: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, workers that were needed then)."""
    changed_at_s: float = 0.0
    grown_at_s: float = 0.0
    review_at_s: float = inf
    """Then it takes the size that fits once more, for the load that made it change is known by then."""
    count: int = -1
    misses: _Misses = field(default_factory=_Misses)
    feedback: "_Feedback" = field(default_factory=lambda: _Feedback())


class Autoscaler:
    """One per cluster."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        self._now_s = 0.0
        """Since the first look."""
        self._classes: dict[Wants, _Class] = {}
        self._costs = BatchCosts()
        self._at_once = Level(rules.hold_s)
        """Requests for which decode workers must have room."""
        self._pools: dict[Role, _Pool] = {role: _Pool() for role in ROLES}
        self._hopeless: deque[tuple[float, _Misses]] = deque()
        """By time: answers that began, and those of them that no number of workers could have had in time."""

    def decide(self, look: Look) -> Decision:
        """Called every `every_s` or so, with everything since the last call."""
        self._now_s += look.seconds
        self._learn(look)
        needs = {"prefill": self._prefill_need(look), "decode": self._decode_need(look)}
        want: dict[Role, int] = {}
        reasons: list[str] = []
        warnings = self._infeasible(look)
        for role in ROLES:
            want[role], reason, warning = self._size(role, look, needs[role])
            reasons += [reason] if reason else []
            warnings += [warning] if warning else []
        convert = self._convert(look, want, needs, reasons)
        warnings += self._keep_to_devices(look, want, convert)
        return Decision(want, convert, tuple(reasons), tuple(warnings))

    def _learn(self, look: Look) -> None:
        rules = self._rules
        came: dict[Wants, list[Arrivals]] = {}
        for arrivals in look.arrivals:
            wants = Wants(arrivals.ttft_s, arrivals.itl_s, arrivals.gives_way)
            came.setdefault(wants, []).append(arrivals)
            kind = self._classes.get(wants)
            if kind is None:
                kind = self._classes[wants] = _Class(Load(rules.hold_s))
                kind.load.add(max(0.0, min(self._now_s, rules.hold_s) - look.seconds) or 1e-9, 0.0, 0.0)
            kind.service_s.extend(arrivals.prefill_s)
            kind.seen_at_s = self._now_s
        for wants, kind in list(self._classes.items()):
            work = squares = 0.0
            for arrivals in came.get(wants, ()):
                stands_for = arrivals.count / max(1, len(arrivals.prefill_s))
                pieces = [s * look.prefill_share for s in arrivals.prefill_s]
                work += sum(pieces) * stands_for
                squares += sum(s * s for s in pieces) * stands_for
            kind.load.add(look.seconds, work, squares)
            if self._now_s - kind.seen_at_s > 2 * rules.hold_s:
                del self._classes[wants]
        self._costs.observe(look.batches)
        # Who waits before a prefill worker that is busy needs no room at a decode worker yet, but may have it.
        running = sum(batch.running for batch in look.batches)
        on_the_way = sum(batch.requests for batch in look.batches) - running
        requests = running + min(on_the_way, look.pools["prefill"].serving) + look.waiting_for_decode
        self._at_once.add(look.seconds, requests)
        began = look.measured.first_tokens + look.measured.hopeless
        self._hopeless.append((self._now_s, _Misses(began, look.measured.hopeless)))
        while self._hopeless[0][0] < self._now_s - rules.hold_s:
            self._hopeless.popleft()
        # A miss of the first token counts for the pool that is short of room.
        decode_is_full = look.waiting_for_decode > 0
        for role, (total, missed) in {
            "prefill": (look.measured.first_tokens, 0 if decode_is_full else look.measured.late),
            "decode": (look.measured.streams, look.measured.uneven),
        }.items():
            pool = self._pools[role]  # type: ignore[index]
            pool.misses.total += total
            pool.misses.missed += missed

    # ------------------------------------------------------------------------------------- how many are needed

    def _prefill_need(self, look: Look) -> _Need:
        """For the prompts that arrive. Stricter classes go first, so each class only competes with those."""
        rules = self._rules
        service_s = list[float]()
        late = least = mean = most = 0.0
        need = _Need(0, 0, 0, 0)
        waits_s = look.queued_prefill_s / max(1, look.pools["prefill"].serving)
        for (target_s, _, gives_way), kind in sorted(self._classes.items()):
            late += kind.load.of_late(rules.window_s)
            least += kind.load.at_least
            mean += kind.load.over(rules.hold_s).mean * (1 + rules.margin / 2)
            most += kind.load.at_most * (1 + rules.margin)
            service_s += [s * look.prefill_share for s in kind.service_s]
            # What waits already must be computed beside what comes.
            backlog = look.queued_prefill_s / rules.hold_s if waits_s > target_s else 0.0
            workers = partial(
                prefill_workers,
                service_s=service_s,
                target_s=target_s,
                goal=rules.goal,
                most=rules.bounds["prefill"].most,
                gives_way=gives_way,
            )
            need = need.or_more(workers(late), workers(max(late, least) + backlog), workers(most), workers(mean))
        return need

    def _decode_need(self, look: Look) -> _Need:
        """For the requests that are there: what was asked for stays for a while, but a moment is no trend."""
        itl_s = min((wants.itl_s for wants in self._classes), default=inf)
        by_time, by_memory = self._costs.most_at_once(itl_s), fit_in_memory(look.batches)

        def workers(requests: float, spread: float) -> int:
            # Too many at once make all of them slow; too little room only makes some of them wait.
            return max(decode_workers(requests, by_time, spread), decode_workers(requests, by_memory, spread / 2))

        window_s, hold_s = self._rules.window_s, self._rules.hold_s
        late = workers(self._at_once.over(window_s / 4), 0.0)
        grow = max(late, workers(self._at_once.over(window_s), 1.0))
        lasting, margin = self._at_once.over(hold_s), self._rules.margin
        keep, fit = workers(lasting * (1 + margin), 3.0), workers(lasting * (1 + margin / 2), 1.5)
        return _Need(1, 1, 1, 1).or_more(late, grow, keep, fit)

    def _level(self, role: Role) -> float:
        """How much is asked of a pool, in a unit of its own."""
        if role == "decode":
            return self._at_once.over(self._rules.hold_s)
        return sum(kind.load.over(self._rules.hold_s).mean for kind in self._classes.values())

    # -------------------------------------------------------------------------------------- what becomes of it

    def _size(self, role: Role, look: Look, need: _Need) -> tuple[int, str, str]:
        """(workers that a pool shall have, why it changes, what stands against it)."""
        rules, pool, now = self._rules, self._pools[role], look.pools[role].count
        bounds = rules.bounds[role]
        if now != pool.count:
            if now > pool.count:
                pool.grown_at_s = self._now_s
            pool.count, pool.changed_at_s, pool.misses = now, self._now_s, _Misses()
        feedback = pool.feedback
        level = self._level(role)
        if (feedback.floor or feedback.useless) and not feedback.level * SAME[0] <= level <= feedback.level * SAME[1]:
            feedback = pool.feedback = _Feedback()  # that was another load
        # What waits since before the pool grew says nothing about its size now.
        caught_up = look.queued_prefill_s <= look.pools["prefill"].serving * min(
            (wants.ttft_s for wants in self._classes), default=0.0
        )
        is_steady = look.pools[role].coming == 0 and self._now_s - pool.changed_at_s >= rules.window_s
        settled = is_steady and caught_up
        missing = ""
        if not settled:
            pool.misses = _Misses()
        elif pool.misses.exceed(rules.goal):
            share = pool.misses.missed / pool.misses.total
            pool.misses = _Misses()
            if feedback.floor and share > feedback.share * HELPED:
                feedback.useless, feedback.floor, pool.review_at_s = True, 0, self._now_s
            elif not feedback.useless and now <= max(need.grow, feedback.floor):
                missing = f"{100 * share:.0f} % of answers miss the target for {_target(role)}"
                feedback.floor, feedback.level, feedback.share = now + 1, level, share
        need = need.no_fewer(feedback.floor)
        useless = (
            f"more {role} workers did not help with answers that miss the target for {_target(role)}"
            if feedback.useless
            else ""
        )
        pool.needed.append((self._now_s, need.late))
        while pool.needed[0][0] < self._now_s - rules.hold_s:
            pool.needed.popleft()
        least = max(bounds.least, 1 if role == "decode" else 0)
        fit = min(max(need.fit, need.grow, least), bounds.most)
        lacks = need.grow > bounds.most
        warning = f"the {role} pool needs {need.grow} workers and may have {bounds.most}" if lacks else useless
        was_enough = max(need.keep, *(count for _, count in pool.needed))
        review_at_s = min(pool.review_at_s, self._now_s + rules.hold_s)
        if need.grow > now or now < least:
            reason = missing or f"the work that arrives needs {fit} {role} workers"
        elif now > bounds.most:
            reason = f"the {role} pool may have {bounds.most} workers"
        elif was_enough < now and self._now_s - pool.grown_at_s >= rules.hold_s:
            reason = f"{fit} {role} workers would have been enough for {rules.hold_s:g} s"
        elif self._now_s >= pool.review_at_s and caught_up:
            reason, review_at_s = f"{fit} {role} workers fit what came within {rules.hold_s:g} s", inf
        else:
            return now, "", warning
        pool.review_at_s = review_at_s
        return fit, reason if fit != now else "", warning

    def _convert(self, look: Look, want: dict[Role, int], needs: Mapping[str, _Need], reasons: list[str]) -> int:
        """Workers that one pool lacks are taken from the other, as far as that has too many, even for a short time."""
        if not self._rules.convertible:
            return 0
        for role in ROLES:
            other = OTHER[role]
            lacking = want[role] - look.pools[role].count
            need = needs[other]
            least = max(self._rules.bounds[other].least, 1 if other == "decode" else 0, need.grow, need.keep)
            spare = min(look.pools[other].serving, look.pools[other].count) - least
            moved = min(lacking, spare)
            # A pool that has just grown has not shown yet what it can spare.
            just_grew = self._now_s - self._pools[other].grown_at_s < self._rules.window_s
            if moved <= 0 or just_grew or want[other] > look.pools[other].count:
                continue
            want[other] = min(want[other], look.pools[other].count - moved)
            reasons.append(f"{moved} of them from the {other} pool, where {least} are enough")
            return moved if role == "decode" else -moved
        return 0

    def _keep_to_devices(self, look: Look, want: dict[Role, int], convert: int) -> list[str]:
        """Lets pools grow no further than there are devices for them; whoever leaves makes room later."""
        rules, warnings = self._rules, []
        if rules.devices is None:
            return []
        # Who changes its role takes its device along.
        kept = {"prefill": -max(0, convert), "decode": -max(0, -convert)}
        taken = sum(max(want[role], look.pools[role].count + kept[role]) * rules.ranks[role] for role in ROLES)
        for role in ROLES:
            over = taken - rules.devices
            lacking = min(max(0, want[role] - look.pools[role].count), max(0, -(-over // rules.ranks[role])))
            if lacking:
                warnings.append(
                    f"the {role} pool needs {want[role]} workers, and there is no room for {lacking} of them"
                )
                want[role] -= lacking
                taken -= lacking * rules.ranks[role]
        return warnings

    def _infeasible(self, look: Look) -> list[str]:
        """What no number of workers helps."""
        warnings = []
        seen = [each for _, each in self._hopeless]
        hopeless = _Misses(sum(each.total for each in seen), sum(each.missed for each in seen))
        if hopeless.total >= FEWEST and hopeless.missed > hopeless.total * (1 - self._rules.goal):
            share = hopeless.missed / hopeless.total
            warnings.append(
                f"{100 * share:.0f} % of prompts alone take longer than their target for the first token; no number of "
                "prefill workers helps: raise the target, give workers more tensor parallelism, or cap prompts"
            )
        itl_s = min((wants.itl_s for wants in self._classes), default=inf)
        if (alone_s := self._costs.alone_s()) > itl_s:
            warnings.append(
                f"a decode step takes {1000 * alone_s:.0f} ms for one request, the target is {1000 * itl_s:.0f} ms: "
                "no number of decode workers helps: raise the target or give workers more tensor parallelism"
            )
        return warnings


def _target(role: Role) -> str:
    return "the first token" if role == "prefill" else "the time between tokens"
