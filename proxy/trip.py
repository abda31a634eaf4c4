"""One client request inside the proxy: its flight, the ids of its legs, and its lifetime."""

from dataclasses import dataclass, field
from typing import Any

from proxy.flight import Flight, LegKind
from proxy.lifetime import Lifetime
from proxy.scheduling.view import RequestShape


@dataclass(slots=True)
class Trip:
    """A request from its arrival until nothing of it is left."""

    request_id: str
    """vLLM's own id in the front end; unique, unlike what clients send."""
    request: Any
    """The client's `EngineCoreRequest`; never changed."""
    shape: RequestShape
    flight: Flight
    lifetime: Lifetime
    group: str = ""
    """Names the siblings of an `n > 1` request; empty otherwise."""
    legs: dict[LegKind, str] = field(default_factory=dict)
    """Engine request id of each leg that runs."""
    transfer_id: str = ""
    """Of the current hand-over attempt."""
    deadline_s: float | None = None
    """While waiting in the proxy's queue."""
    num_outputs: int = 0
    scores: Any = None
    """Prompt scores of this request (`PromptScores`), or those a sibling got from its leader."""


@dataclass(slots=True)
class Leg:
    """One engine request at one worker."""

    trip: Trip
    kind: LegKind
    worker_id: str
    prompt_tokens: int


@dataclass(slots=True)
class Workload:
    """What the proxy has sent to one worker and what has not ended there."""

    legs: set[str] = field(default_factory=set)
    queued_tokens: int = 0
    """Prompt tokens of its prefill legs."""


@dataclass(slots=True)
class Siblings:
    """The children of one `n > 1` request: one fetches the prompt, the others wait and then find it cached."""

    leader: str
    """Request id."""
    members: set[str]
    waiting: list[str] = field(default_factory=list)
    """Request ids, in order of arrival."""
    scores: Any = None
    """The leader's `PromptScores`, once known."""
