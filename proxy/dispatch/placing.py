"""The scheduler's shell: tells it what becomes of requests and workers, and passes on what it decides.

Decisions are taken when something has changed that may allow one (a request came, a prefill ended, room was given back,
a worker came or reported), never by polling; the beat looks after deadlines.
"""

import time
from collections.abc import Callable
from typing import Any

from cluster.messages import WorkerLoad
from proxy.adapters.holdings import Holdings
from proxy.scheduling.place import Decision, Policy
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import CachedPrefixes
from proxy.trips.trip import Trip
from proxy.workers.roster import Roster

Decide = Callable[[Decision], Any]


class Placing:
    """Owns the queue of requests that nobody works on. `decide` is called from within `settle` only."""

    def __init__(
        self, policy: Policy, prefixes: CachedPrefixes, roster: Roster, adapters: Holdings, decide: Decide
    ) -> None:
        self._scheduler = Scheduler(policy, prefixes)
        self._roster = roster
        self._adapters = adapters
        self._decide = decide
        self._changed = False
        self._settling = False

    @property
    def scheduler(self) -> Scheduler:
        """To be read by the autoscaler."""
        return self._scheduler

    # ------------------------------------------------------------------------------------------------- requests

    def queue(self, trip: Trip) -> None:
        """A request wants a place, for the first time or because it lost the one it had."""
        now_s = time.monotonic()
        self._scheduler.remove(trip.request_id, now_s)
        self._scheduler.add(trip.request_id, trip.shape, trip.lifetime.last("arrived") or now_s, now_s)
        self._changed = True

    def follow(self, trip: Trip, worker_id: str) -> bool:
        """A sibling goes where its prompt is, without having queued; False if there is no room for it."""
        return self._scheduler.follow(trip.request_id, trip.shape, worker_id, time.monotonic())

    def prompt_computed(self, trip: Trip) -> None:
        """A prefill has ended, or a worker that does everything gave its first token."""
        self._changed |= self._scheduler.complete(trip.request_id, time.monotonic())

    def prefill_over(self, trip: Trip) -> None:
        """A prefill leg has ended, whether it got to the end of the prompt or not."""
        self._changed |= self._scheduler.give_up_prefill(trip.request_id, time.monotonic())

    def forget(self, trip: Trip) -> None:
        """A request has ended."""
        ended_by_itself = trip.lifetime.last("finished") is not None
        self._scheduler.remove(trip.request_id, time.monotonic(), trip.num_tokens if ended_by_itself else None)
        self._changed = True

    # -------------------------------------------------------------------------------------------------- workers

    def look_at_workers(self) -> None:
        """Somebody came, went or changed."""
        roster, facts = self._roster, self._roster.facts()
        adapters = self._adapters.view(facts)
        self._scheduler.observe_pools(facts, roster.compatible, time.monotonic(), roster.awaited(), adapters)
        self._changed = True

    def look_at_load(self, worker_id: str, load: WorkerLoad) -> None:
        """A worker reported."""
        self._scheduler.observe_load(worker_id, load.blocks_total - load.blocks_free, load.blocks_total)
        self._changed = True

    def look_at_step(self, worker_id: str, now_s: float, *, goes_on: bool) -> None:
        """A worker gave outputs; `goes_on`: some to requests that had one in its step before."""
        self._scheduler.observe_step(worker_id, now_s, goes_on=goes_on)

    # ------------------------------------------------------------------------------------------------- deciding

    def settle(self) -> None:
        """Takes every decision that has become possible. What `decide` does may make further ones possible."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._changed:
                self._changed = False
                for decision in self._scheduler.place(time.monotonic()):
                    self._decide(decision)
        finally:
            self._settling = False

    def beat(self, now_s: float, timeout_s: float, absent_s: float) -> list[str]:
        """Request ids of those that have waited for too long (`Scheduler.expire`); they are out of the queue."""
        self._changed = True
        return self._scheduler.expire(now_s, timeout_s, absent_s)
