"""Which engine requests run where: the ids of all legs, and what each worker has been given."""

import uuid
from dataclasses import dataclass, field

from proxy.flights.events import LegKind
from proxy.flights.flight import Stage
from proxy.trips.trip import Trip


@dataclass(slots=True)
class Leg:
    """One engine request at one worker."""

    engine_request_id: str
    trip: Trip
    kind: LegKind
    worker_id: str


@dataclass(slots=True)
class Workload:
    """What the proxy has sent to one worker and what has not ended there."""

    legs: set[str] = field(default_factory=set)
    """Engine request ids."""


class Legbook:
    """Every leg that runs. Ids are minted here; a client's id is never used."""

    def __init__(self) -> None:
        self._legs: dict[str, Leg] = {}
        self._workloads: dict[str, Workload] = {}

    def __len__(self) -> int:
        return len(self._legs)

    def find(self, engine_request_id: str, worker_id: str) -> Leg | None:
        """The leg with this id at this worker; None if it has ended or was never there."""
        leg = self._legs.get(engine_request_id)
        return leg if leg is not None and leg.worker_id == worker_id else None

    def open(self, trip: Trip, kind: LegKind, worker_id: str) -> str:
        """Notes a new leg and returns its engine request id."""
        engine_request_id = uuid.uuid4().hex
        self._legs[engine_request_id] = Leg(engine_request_id, trip, kind, worker_id)
        trip.legs[kind] = engine_request_id
        workload = self._workloads.setdefault(worker_id, Workload())
        workload.legs.add(engine_request_id)
        return engine_request_id

    def close(self, trip: Trip, kind: LegKind) -> str | None:
        """Forgets a leg; its id, or None if it had ended already."""
        engine_request_id = trip.legs.pop(kind, None)
        leg = self._legs.pop(engine_request_id, None) if engine_request_id is not None else None
        if leg is None:
            return None
        workload = self._workloads[leg.worker_id]
        workload.legs.discard(leg.engine_request_id)
        return leg.engine_request_id

    def workload(self, worker_id: str) -> Workload:
        """What a worker has now; not to be changed."""
        return self._workloads.get(worker_id) or Workload()

    def at_work(self) -> set[str]:
        """Workers that have something to get on with; a decode leg that waits for its prefill is nothing yet."""
        waiting = (Stage.WAITING, Stage.PREFILLING)
        return {
            leg.worker_id for leg in self._legs.values() if leg.kind != "decode" or leg.trip.flight.stage not in waiting
        }

    def lose(self, worker_id: str) -> list[Leg]:
        """Forgets every leg at a worker and returns them."""
        lost = [self._legs[engine_request_id] for engine_request_id in sorted(self.workload(worker_id).legs)]
        for leg in lost:
            self.close(leg.trip, leg.kind)
        return lost
