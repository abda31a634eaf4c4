"""Decides which models are up, and what becomes of requests for those that are not. Pure: time is passed in.

Whoever uses it tells what happens (`arrive`, `leave`, `came_up`, `fell_asleep`, `got_stuck`, `ended`, `add`, `remove`)
and calls `step` afterwards, and again at `look_again_s`; `step` says which models to start, to stop, to put to sleep,
to wake, and who of those that waited may go on.

A model takes its cost of the capacity from its start until it sleeps, or nothing is left of it. One that makes room
already has its place, while those that had it before are still stopping; so two models never stop others for the same
place. Beds are counted likewise: one who is to sleep waits until whoever leaves a bed for him is gone.
"""

import itertools
import math
from collections.abc import Iterator

from cluster.launch.backoff import Backoff
from proxy.models.answers import Admitted, Answer, Refused, Verdict, Waits
from proxy.models.residents import Order, Resident, Sleep, Start, State, Step, Stop, Wake
from proxy.models.terms import Terms

BACKOFF_S = (1.0, 3.0, 10.0, 30.0, 60.0)
"""After so many failures in a row a model is not started for so long; the last one stays."""
STEADY_S = 60.0
"""A model that was up for so long did not fail in a row with the time before."""
_PLACED = (State.ROOM, State.STARTING, State.WAKING, State.UP)


class Residency:
    """All models of a front."""

    def __init__(self, capacity: float = math.inf, max_waiting: int = 256, max_asleep: int = 0) -> None:
        """`capacity` is in units of cost; `max_waiting` requests may wait for one model; so many models may sleep, or
        have slept since their start."""
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_asleep = max_asleep
        self._residents: dict[str, Resident] = {}
        self._tickets = itertools.count(1)
        self._owners: dict[int, Resident] = {}
        self._verdicts: list[Verdict] = []
        self._stuck: list[Resident] = []
        self._bedtimes: dict[str, str] = {}
        """Models that are about to fall asleep and wait for a bed, and why."""
        self._closed = False

    def __iter__(self) -> Iterator[Resident]:
        return iter(list(self._residents.values()))

    def find(self, name: str) -> Resident | None:
        """A model on the map, or one that was taken off it and still has processes."""
        return self._residents.get(name)

    @property
    def load(self) -> int:
        """Cost of the models that have a place: those with processes, unless they sleep."""
        return sum(r.terms.cost for r in self._residents.values() if r.has_place)

    # What happens.

    def add(self, name: str, terms: Terms, now_s: float) -> None:
        """Puts a model on the map. Raises `ValueError` when one of this name is there or still stopping."""
        if name in self._residents:
            raise ValueError(f"the model {name} is there already")
        resident = Resident(name, terms, Backoff(BACKOFF_S, STEADY_S), since_s=now_s, used_s=now_s)
        if terms.policy == "pinned":
            resident.wanted_since_s = now_s
        self._residents[name] = resident

    def remove(self, name: str, now_s: float, within_s: float) -> None:
        """Takes no new requests for a model; it goes when it has finished those it has, at the latest `within_s`."""
        resident = self._residents[name]
        by_s = now_s + within_s
        resident.removed_by_s = by_s if resident.removed_by_s is None else min(by_s, resident.removed_by_s)

    def arrive(self, name: str, now_s: float) -> Answer:
        """A request for a model. Whoever is not refused ends with `leave`."""
        resident = self._residents.get(name)
        if resident is None or not resident.listed:
            return Refused.unknown(name)
        if self._closed:
            return Refused(503, "stopping", "The server is shutting down", 5.0)
        if resident.removed_by_s is not None:
            return Refused.removed(name)
        if resident.state is State.UP:
            return self._admit(next(self._tickets), resident, now_s)
        if now_s < resident.not_before_s and resident.state is State.DOWN:
            return self._failed(resident, now_s)
        if len(resident.waiting) >= self._max_waiting:
            text = f"{len(resident.waiting)} requests already wait for the model {name} to be up"
            return Refused(429, "queue_full", text, self._ready_in_s(resident, now_s))
        if not resident.is_wanted(now_s):
            resident.wanted_since_s = now_s
        if resident.terms.on_starting == "reject":
            resident.wanted_until_s = now_s + resident.terms.start_wait_s
            return self._not_up(resident, now_s, "starting")
        ticket = next(self._tickets)
        until_s = now_s + resident.terms.start_wait_s
        resident.waiting[ticket] = until_s
        self._owners[ticket] = resident
        return Waits(ticket, until_s)

    def leave(self, ticket: int, now_s: float) -> None:
        """A request that was admitted or waited has ended, in whatever way. A second time does nothing."""
        resident = self._owners.pop(ticket, None)
        if resident is None:
            return
        if ticket in resident.running:
            resident.running.discard(ticket)
            resident.used_s = now_s
        resident.waiting.pop(ticket, None)

    def came_up(self, name: str, now_s: float) -> None:
        """Its processes serve, for the first time or again."""
        resident = self._residents[name]
        if resident.state is State.STARTING:
            resident.start_took_s = now_s - resident.since_s
        elif resident.state is State.WAKING:
            resident.wake_took_s = now_s - resident.since_s
        else:
            return  # it was told to stop meanwhile
        resident.wanted_until_s = -math.inf
        resident.used_s = now_s
        self._enter(resident, State.UP, now_s)

    def fell_asleep(self, name: str, now_s: float) -> None:
        """It sleeps; its place is free."""
        resident = self._residents[name]
        if resident.state is State.FALLING_ASLEEP and resident.has_bed:
            resident.has_place = False
            self._enter(resident, State.ASLEEP, now_s)

    def got_stuck(self, name: str, cause: str) -> None:
        """It did not fall asleep, or did not wake up. It is stopped, and started when it is wanted."""
        resident = self._residents[name]
        if resident.state in (State.FALLING_ASLEEP, State.WAKING) and resident.has_bed:
            resident.cause = cause
            self._stuck.append(resident)

    def ended(self, name: str, now_s: float, cause: str = "") -> None:
        """Nothing is left of its processes. `cause` says why, if nobody asked for it."""
        resident = self._residents[name]
        if resident.state in (State.STARTING, State.UP):
            lasted_s = now_s - resident.since_s if resident.state is State.UP else 0.0
            resident.cause = cause
            resident.not_before_s = now_s + resident.backoff.failed(lasted_s)
            for ticket in list(resident.waiting):
                self._refuse(ticket, resident, self._failed(resident, now_s))
        elif resident.state is not State.STOPPING:
            resident.cause = cause  # of one that slept: whoever waits for it waits until it is started instead
        resident.has_bed = False
        self._bedtimes.pop(name, None)
        if resident.state is State.ROOM:
            return  # it has its place and is started when that is free
        resident.has_place = False
        self._enter(resident, State.DOWN, now_s)
        if not resident.listed:
            del self._residents[name]

    def close(self, now_s: float) -> None:
        """The front stops: nobody waits any more, nothing is started."""
        self._closed = True
        for resident in self._residents.values():
            for ticket in list(resident.waiting):
                refusal = Refused(503, "stopping", "The server is shutting down", 5.0)
                self._refuse(ticket, resident, refusal)

    # What follows.

    def step(self, now_s: float) -> Step:
        """What is to be done now. Everything it says counts as under way."""
        orders: list[Order] = []
        gone: list[str] = []
        for resident in list(self._residents.values()):
            self._let_on(resident, now_s)
        if not self._closed:
            for resident in self._stuck:
                if resident.state in (State.FALLING_ASLEEP, State.WAKING):
                    self._stop(resident, "stuck", now_s, orders)
            self._stuck = []
            for resident in list(self._residents.values()):
                self._let_go(resident, now_s, orders, gone)
            self._make_room(now_s, orders)
            self._put_to_bed(orders)
            self._start(now_s, orders)
        verdicts, self._verdicts = tuple(self._verdicts), []
        return Step(tuple(orders), verdicts, tuple(gone), self._look_again_s(now_s))

    def _let_on(self, resident: Resident, now_s: float) -> None:
        """Those that waited go on, or have waited long enough."""
        for ticket, until_s in list(resident.waiting.items()):
            if resident.state is State.UP:
                del resident.waiting[ticket]
                self._verdicts.append(Verdict(ticket, self._admit(ticket, resident, now_s)))
            elif until_s <= now_s:
                self._refuse(ticket, resident, self._not_up(resident, now_s, "waited_too_long"))

    def _let_go(self, resident: Resident, now_s: float, orders: list[Order], gone: list[str]) -> None:
        """Stops who is removed and has finished, and who has been idle for too long."""
        removed_by_s = resident.removed_by_s
        if removed_by_s is not None and resident.listed:
            if (resident.running or resident.waiting) and now_s < removed_by_s:
                return
            resident.listed = False
            gone.append(resident.name)
            for ticket in list(resident.waiting):
                self._refuse(ticket, resident, Refused.removed(resident.name))
            if not resident.has_processes:
                del self._residents[resident.name]
            elif resident.state is not State.STOPPING:
                self._stop(resident, "removed", now_s, orders)
        elif resident.terms.policy == "scale_to_zero" and self._idle_until_s(resident) <= now_s:
            self._clear_place(resident, "idle", now_s, orders)

    def _make_room(self, now_s: float, orders: list[Order]) -> None:
        """Gives places to those that are wanted, who has waited longest first."""
        for wanted in self._wanted(now_s):
            missing = self._planned(without=wanted) + wanted.terms.cost - self._capacity
            victims = self._victims(missing, now_s)
            if victims is None:
                continue
            for victim in victims:
                self._clear_place(victim, "evicted", now_s, orders)
            self._enter(wanted, State.ROOM, now_s)

    def _wanted(self, now_s: float) -> list[Resident]:
        found = [
            resident
            for resident in self._residents.values()
            if resident.is_out and resident.is_wanted(now_s) and resident.not_before_s <= now_s
        ]
        return sorted(found, key=lambda resident: (not resident.is_pinned, resident.wanted_since_s))

    def _victims(self, missing: float, now_s: float) -> list[Resident] | None:
        """Who is stopped so that `missing` units of cost become free; None if not enough can be had now."""
        if missing <= 0:
            return []
        idle = sorted(
            (resident for resident in self._residents.values() if resident.may_go_from_s <= now_s),
            key=lambda resident: resident.used_s,
        )
        chosen: list[Resident] = []
        for resident in idle:
            chosen.append(resident)
            if sum(victim.terms.cost for victim in chosen) >= missing:
                break
        else:
            return None
        for resident in list(chosen):  # a large one makes smaller ones before it unnecessary
            if sum(victim.terms.cost for victim in chosen) - resident.terms.cost >= missing:
                chosen.remove(resident)
        return chosen

    def _clear_place(self, resident: Resident, reason: str, now_s: float, orders: list[Order]) -> None:
        """Its place becomes free: it falls asleep, or else it is stopped."""
        if resident.terms.sleeps and self._find_bed(resident, now_s, orders):
            resident.backoff.forget()
            resident.cause = ""
            self._enter(resident, State.FALLING_ASLEEP, now_s)
            self._bedtimes[resident.name] = reason
        else:
            self._stop(resident, reason, now_s, orders)

    def _find_bed(self, resident: Resident, now_s: float, orders: list[Order]) -> bool:
        """Whether there is one for it, or will be: whoever slept longest without being asked for leaves his."""
        if resident.has_bed:
            return True
        staying = [r for r in self._residents.values() if r.state is not State.STOPPING]
        if sum(r.has_bed or r.state is State.FALLING_ASLEEP for r in staying) < self._max_asleep:
            return True
        sleepers = [r for r in staying if r.state is State.ASLEEP and not r.is_wanted(now_s)]
        if not sleepers:
            return False
        self._stop(min(sleepers, key=lambda sleeper: sleeper.used_s), "displaced", now_s, orders)
        return True

    def _put_to_bed(self, orders: list[Order]) -> None:
        """Those that fall asleep do so when a bed is free."""
        for resident in self._residents.values():
            if resident.state is State.FALLING_ASLEEP and (reason := self._bedtimes.get(resident.name)):
                taken = sum(r.has_bed for r in self._residents.values() if r is not resident)
                if resident.has_bed or taken < self._max_asleep:
                    del self._bedtimes[resident.name]
                    resident.has_bed = True
                    orders.append(Sleep(resident.name, reason))

    def _start(self, now_s: float, orders: list[Order]) -> None:
        """Starts, or wakes, those whose room is free."""
        placed = [resident for resident in self._residents.values() if resident.state is State.ROOM]
        for resident in sorted(placed, key=lambda resident: resident.since_s):
            if self.load + resident.terms.cost <= self._capacity:
                resident.has_place = True
                if resident.has_bed:
                    resident.wakes += 1
                    self._enter(resident, State.WAKING, now_s)
                    orders.append(Wake(resident.name))
                else:
                    resident.starts += 1
                    self._enter(resident, State.STARTING, now_s)
                    orders.append(Start(resident.name))

    def _planned(self, without: Resident) -> int:
        """Cost of all that have a place, or have it for certain as soon as they can be started."""
        return sum(
            resident.terms.cost
            for resident in self._residents.values()
            if resident is not without and (resident.state in _PLACED or resident.is_pinned)
        )

    def _look_again_s(self, now_s: float) -> float | None:
        """The next moment at which something may follow from time alone."""
        moments: list[float] = []
        somebody_waits = any(r.is_out and r.is_wanted(now_s) for r in self._residents.values())
        for resident in self._residents.values():
            moments += resident.waiting.values()
            if self._closed:
                continue
            if resident.removed_by_s is not None and resident.listed:
                moments.append(resident.removed_by_s)
            if resident.terms.policy == "scale_to_zero":
                moments.append(self._idle_until_s(resident))
            if resident.is_out and resident.is_wanted(now_s):
                moments.append(resident.not_before_s)
            if somebody_waits:
                moments.append(resident.may_go_from_s)
        later = [moment for moment in moments if now_s < moment < math.inf]
        return min(later, default=None)

    # Small steps.

    def _admit(self, ticket: int, resident: Resident, now_s: float) -> Admitted:
        resident.running.add(ticket)
        resident.used_s = now_s
        self._owners[ticket] = resident
        return Admitted(ticket)

    def _refuse(self, ticket: int, resident: Resident, refusal: Refused) -> None:
        del resident.waiting[ticket]
        del self._owners[ticket]
        self._verdicts.append(Verdict(ticket, refusal))

    def _stop(self, resident: Resident, reason: str, now_s: float, orders: list[Order]) -> None:
        if resident.state is State.UP:
            resident.backoff.forget()
            resident.cause = ""
        self._bedtimes.pop(resident.name, None)
        self._enter(resident, State.STOPPING, now_s)
        orders.append(Stop(resident.name, reason))

    def _enter(self, resident: Resident, state: State, now_s: float) -> None:
        resident.state = state
        resident.since_s = now_s

    def _idle_until_s(self, resident: Resident) -> float:
        """When it has been idle for so long that it stops; infinite while it has requests or is not up."""
        if resident.state is not State.UP or resident.running or resident.waiting:
            return math.inf
        return max(resident.used_s + resident.terms.idle_s, resident.since_s + resident.terms.min_residency_s)

    def _failed(self, resident: Resident, now_s: float) -> Refused:
        text = f"The model {resident.name} could not be kept up: {resident.cause or 'its processes ended'}"
        return Refused(503, "start_failed", text, max(0.0, resident.not_before_s - now_s) + resident.start_took_s)

    def _not_up(self, resident: Resident, now_s: float, reason: str) -> Refused:
        if resident.state in (State.STARTING, State.WAKING, State.ROOM):
            text = f"The model {resident.name} is being {'woken' if resident.has_bed else 'started'}"
            return Refused(503, reason, text, self._ready_in_s(resident, now_s))
        busy = self._planned(without=resident) + resident.terms.cost > self._capacity
        if busy:
            reason = "no_room"
        why = "waits for the place of another model, which is in use" if busy else "is not up yet"
        return Refused(503, reason, f"The model {resident.name} {why}", self._ready_in_s(resident, now_s))

    def _ready_in_s(self, resident: Resident, now_s: float) -> float:
        """An estimate of how long it takes until the model is up."""
        if resident.state in (State.STARTING, State.WAKING):
            return max(1.0, resident.since_s + resident.takes_s - now_s)
        places = (other.may_go_from_s for other in self._residents.values() if other is not resident)
        missing = self._planned(without=resident) + resident.terms.cost > self._capacity
        free_s = min((moment for moment in places if moment < math.inf), default=now_s) if missing else now_s
        return max(0.0, free_s - now_s) + resident.takes_s
