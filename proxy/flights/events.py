"""What can happen to a flight."""

from dataclasses import dataclass
from typing import Any, Literal

from proxy.scheduling.place import Placement

LegKind = Literal["prefill", "decode", "local"]
Finish = Literal["stop", "length", "abort", "error", "repetition"]
"""vLLM's `FinishReason` in lower case."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something failed."""

    kind: str
    """One word, for counting."""
    message: str
    """A sentence for the client."""
    retry_after_s: float | None = None
    """When it is worth trying again; None: not known."""


@dataclass(frozen=True, slots=True)
class Placed:
    placement: Placement


@dataclass(frozen=True, slots=True)
class Continued:
    """The tokens sent have become part of the prompt, and this is what is left of the request."""

    num_prompt_tokens: int
    max_tokens: int
    first_token_mode: bool


@dataclass(frozen=True, slots=True)
class CannotContinue:
    """No other worker can go on exactly; `cause` says why."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The prefill engine scheduled the first chunk."""


@dataclass(frozen=True, slots=True)
class LegOutput:
    """One engine step's output of a leg. `payload` is passed through, never looked at."""

    leg: LegKind
    token: int | None
    """The first new token, if any."""
    finish: Finish | None
    payload: Any


@dataclass(frozen=True, slots=True)
class HandoverClosed:
    """The decode worker will fetch nothing more: `loaded`, `recompute` or `cancelled`."""

    outcome: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client left, a stop string ended the request, or a sibling failed."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    cause: Cause


Event = (
    Placed
    | Continued
    | CannotContinue
    | PrefillStarted
    | LegOutput
    | HandoverClosed
    | WorkerLost
    | Aborted
    | DeadlinePassed
)
