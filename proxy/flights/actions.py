"""What a flight wants done."""

from dataclasses import dataclass
from typing import Any

from proxy.flights.events import Cause, LegKind


@dataclass(frozen=True, slots=True)
class SubmitPrefill:
    worker: str


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    worker: str


@dataclass(frozen=True, slots=True)
class SubmitLocal:
    worker: str


@dataclass(frozen=True, slots=True)
class SendFirstToken:
    worker: str
    token: int


@dataclass(frozen=True, slots=True)
class DropTransfer:
    """Tell the prefill worker that nobody will fetch the blocks."""

    worker: str


@dataclass(frozen=True, slots=True)
class AbortLeg:
    leg: LegKind
    worker: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Give an output to the client. `prefill` is what a dropped prefill output contributes to it (exact mode)."""

    leg: LegKind
    payload: Any
    finished: bool
    prefill: Any = None


@dataclass(frozen=True, slots=True)
class PlaceAnew:
    """Nobody has seen anything of it: choose workers again, and mint new ids; answer with `Placed`."""

    cause: Cause
    lost: str
    """The worker."""


@dataclass(frozen=True, slots=True)
class Continue:
    """What the client has got becomes part of the prompt: answer with `Continued` and place it, or `CannotContinue`."""

    cause: Cause
    lost: str
    """The worker."""


@dataclass(frozen=True, slots=True)
class Fail:
    status: int
    cause: Cause


Action = (
    SubmitPrefill
    | SubmitDecode
    | SubmitLocal
    | SendFirstToken
    | DropTransfer
    | AbortLeg
    | Emit
    | PlaceAnew
    | Continue
    | Fail
)
