"""Models as `Residency` keeps them, and what it orders."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.launch.backoff import Backoff
from proxy.models.answers import Verdict
from proxy.models.terms import Terms

FIRST_START_S = 30.0
"""How long a start is believed to take until one has been seen."""
FIRST_WAKE_S = 5.0
"""The same for waking."""


class State(StrEnum):
    """Of the processes of a model."""

    DOWN = "down"
    ROOM = "making room"
    """It has its place; others that had it are stopping."""
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    FALLING_ASLEEP = "falling asleep"
    """Its place is free when it sleeps."""
    ASLEEP = "asleep"
    """It has no place: its weights are in the memory of the host, its processes wait."""
    WAKING = "waking"


@dataclass(frozen=True, slots=True)
class Start:
    """Start its processes; `came_up` or `ended` follows."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End its processes; `ended` follows."""

    name: str
    reason: str
    """`evicted`, `idle`, `removed`; `displaced`: it slept, and another sleeps in its stead; `stuck`: it did not fall
    asleep or wake up."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Put it to sleep; `fell_asleep`, `got_stuck` or `ended` follows."""

    name: str
    reason: str
    """`evicted` or `idle`."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake it; `came_up`, `got_stuck` or `ended` follows."""

    name: str


Order = Start | Stop | Sleep | Wake


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done now."""

    orders: tuple[Order, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    off_the_map: tuple[str, ...] = ()
    """Removed models that have finished their requests; they are told before their processes are stopped."""
    look_again_s: float | None = None
    """Call `step` then, on the clock of its argument, unless something happens before."""


@dataclass(slots=True, eq=False)
class Resident:
    """A model and what happens to it. To be read by others, never written."""

    name: str
    terms: Terms
    backoff: Backoff
    state: State = State.DOWN
    running: set[int] = field(default_factory=set)
    """Tickets of requests that it has."""
    waiting: dict[int, float] = field(default_factory=dict)
    """Tickets of those that wait until it is up, oldest first, and until when they do."""
    wanted_until_s: float = -math.inf
    """Somebody who did not wait asked for it, and may come again until then."""
    wanted_since_s: float = math.inf
    since_s: float = 0.0
    """When it entered its state."""
    used_s: float = 0.0
    """When it last had a request."""
    start_took_s: float = FIRST_START_S
    not_before_s: float = -math.inf
    cause: str = ""
    removed_by_s: float | None = None
    """It is being removed: it takes no new requests, and is off the map by then at the latest."""
    listed: bool = True
    starts: int = 0
    wakes: int = 0
    wake_took_s: float = FIRST_WAKE_S
    has_bed: bool = False
    """It sleeps or slept: the host keeps the memory for its weights until its processes end."""
    has_place: bool = False
    """It takes its cost of the capacity."""

    @property
    def is_out(self) -> bool:
        """Whether it has to be started or woken before it serves, and nothing of that is under way."""
        return self.state in (State.DOWN, State.ASLEEP)

    @property
    def has_processes(self) -> bool:
        """Whether there is something to stop."""
        return self.has_bed or self.state not in (State.DOWN, State.ROOM)

    @property
    def takes_s(self) -> float:
        """About how long it takes to be up, once it has its place."""
        return self.wake_took_s if self.has_bed else self.start_took_s

    @property
    def is_pinned(self) -> bool:
        """Whether it shall be up without being asked for."""
        return self.terms.policy == "pinned" and self.removed_by_s is None

    def is_wanted(self, now_s: float) -> bool:
        """Whether there is a reason to start it."""
        return bool(self.waiting) or self.is_pinned or (self.wanted_until_s > now_s and self.removed_by_s is None)

    @property
    def may_go_from_s(self) -> float:
        """From when on others may have its place; infinite while it has requests, or for good."""
        if self.state is not State.UP or self.is_pinned or self.running or self.waiting:
            return math.inf
        return self.since_s + self.terms.min_residency_s
