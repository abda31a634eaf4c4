"""One request's way through its workers, as a value: its stage, its legs, and what its client has.

    WAITING       nobody works on it: in the proxy's queue, or behind the sibling that fetches the prompt for it. Also
                  after a loss: it starts over, or goes on where the client's tokens end
    PREFILLING    the prefill leg runs; the decode leg may have been submitted to reserve its blocks
    HANDING_OVER  the prefill leg has ended; blocks may still be moving
    DECODING      the decode worker has the blocks, or recomputes them
    LOCAL         one worker does everything
    FINISHED      nothing is left anywhere

What each event means to it is in `transitions.py`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from proxy.flights.actions import Action
from proxy.flights.events import Cause, Event, LegOutput


class Stage(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"
    DECODING = "decoding"
    LOCAL = "local"
    FINISHED = "finished"


class IllegalTransition(Exception):
    """An event reached a flight in a stage where it cannot happen: a fault of the proxy or of a worker."""

    def __init__(self, stage: Stage, event: Event) -> None:
        super().__init__(f"{type(event).__name__} cannot happen to a request in stage {stage.value}")


@dataclass(frozen=True, slots=True)
class Flight:
    """Where one request stands."""

    num_prompt_tokens: int
    max_tokens: int
    max_model_len: int
    """Of every worker it may run on."""
    first_token_mode: bool
    wants_prompt_scores: bool
    reserve_at_start: bool
    """Submit the decode leg when the prefill starts, not when it has ended."""
    open_ended: bool = False
    """Streamed input: an output's finish reason ends a turn, not the request."""
    streamed: bool = False
    """The input came in pieces, which are not kept: it cannot start over."""
    max_losses: int = 3
    """So many workers lost in a row without one new token in between, and it fails."""

    stage: Stage = Stage.WAITING
    prefill: str = ""
    """Worker of the prefill leg."""
    decode: str = ""
    """Worker of the decode leg, or of the only leg (LOCAL)."""
    prefill_running: bool = False
    decode_submitted: bool = False
    decode_running: bool = False
    handover_closed: bool = False
    lease_open: bool = False
    """The prefill worker may hold blocks for us; whoever ends the flight must drop or consume them."""
    emitted: bool = False
    """The client has seen something of it: from here on it cannot start over, only be continued."""
    progressed: bool = False
    """The client got a token since it was placed last."""
    losses: int = 0
    """Workers lost in a row without a new token; those that had nothing of it yet do not count."""
    lost: Cause | None = None
    """Why it was taken from its workers last."""
    held: tuple[LegOutput, ...] = ()
    """Decode outputs that overtook the prefill output."""
    prefill_payload: Any = None
    """Exact mode: the prefill output, until the first decode output takes it along."""

    @property
    def finished(self) -> bool:
        return self.stage is Stage.FINISHED


@dataclass(frozen=True, slots=True)
class Step:
    """The flight after an event, and what must be done now, in this order."""

    flight: Flight
    actions: tuple[Action, ...] = ()
