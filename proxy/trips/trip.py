"""One client request inside the proxy: its flight, the ids of its legs, and its lifetime."""

from dataclasses import dataclass, field
from typing import Any

from proxy.flights.events import LegKind
from proxy.flights.flight import Flight
from proxy.scheduling.view import RequestShape
from proxy.slo.account import Account
from proxy.slo.party import Party
from proxy.slo.rate_limits import NOTHING, Reservation
from proxy.trips.front_end import FrontEnd
from proxy.trips.lifetime import Lifetime


@dataclass(slots=True)
class Trip:
    """A request from its arrival until nothing of it is left."""

    request_id: str
    """vLLM's own id in the front end; unique, unlike what clients send."""
    request: Any
    """The client's `EngineCoreRequest`; never changed."""
    shape: RequestShape
    """Of `rest`."""
    flight: Flight
    lifetime: Lifetime
    front_end: FrontEnd
    """Where its outputs and its failure go."""
    account: Account
    """How it fares against its class."""
    group: str = ""
    """Names the siblings of an `n > 1` request; empty otherwise."""
    choices: int = 1
    """`n`: how many siblings there are or will be, this one included."""
    reserved: Reservation = NOTHING
    """Of its key's tokens per minute."""
    party: Party | None = None
    """How the siblings fare together."""
    legs: dict[LegKind, str] = field(default_factory=dict)
    """Engine request id of each leg that runs."""
    transfer_id: str = ""
    """Of the current hand-over attempt."""
    demoted: bool = False
    """Its first token cannot come in time, and it goes behind those whose can."""
    num_outputs: int = 0
    passes_on: LegKind | None = None
    """The leg whose outputs go straight to the client: nothing of interest is left to happen but their end."""
    expected_cached_tokens: int | None = None
    """Prompt tokens that should be in the cache of the worker that got the prompt; None: that is not known."""
    sent: list[int] | None = None
    """Every token the client got; None if they are not kept, because nobody else could go on after them."""
    continued: Any = None
    """What is left of the request after its stream lost a worker: tokens sent count as prompt."""
    scores: Any = None
    """Prompt scores of this request (`PromptScores`), or those a sibling got from its leader."""

    @property
    def rest(self) -> Any:
        """The `EngineCoreRequest` that legs are made of."""
        return self.request if self.continued is None else self.continued

    @property
    def num_tokens(self) -> int:
        """Of its answer so far; where they are not kept, an output counts as one."""
        return self.num_outputs if self.sent is None else len(self.sent)

    @property
    def label(self) -> str:
        """The id the client knows it by: for logs and reports, never a key."""
        return getattr(self.request, "external_req_id", None) or self.request_id
