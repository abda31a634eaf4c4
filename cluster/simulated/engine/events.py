"""What a simulated engine tells the transfers of its worker, in the order it happened."""

from dataclasses import dataclass

from cluster.simulated.engine.sequence import ImportOrder


@dataclass(frozen=True, slots=True)
class ExportStarted:
    """The first chunk of a prompt that another worker wants was scheduled."""

    transfer_id: str
    num_tokens: int
    """Of the whole prompt."""
    prompt_state: int
    """`vocabulary.state_of` the prompt: both sides compare it."""


@dataclass(frozen=True, slots=True)
class ExportProgressed:
    """So many tokens of the prompt are computed. Fewer than before: it was preempted and starts over."""

    transfer_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExportFinished:
    """The prompt is computed; its blocks are leased until `SimulatedEngine.end_lease`."""

    transfer_id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class ExportAborted:
    """There will be nothing to fetch."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImportOpened:
    """A request arrived whose prompt another worker computes."""

    order: ImportOrder
    num_tokens: int
    prompt_state: int


@dataclass(frozen=True, slots=True)
class ImportPlaced:
    """Its blocks are reserved; the first `num_cached` tokens are here already."""

    transfer_id: str
    num_cached: int


@dataclass(frozen=True, slots=True)
class ImportCancelled:
    """Nobody waits for it any more."""

    transfer_id: str


EngineEvent = (
    ExportStarted | ExportProgressed | ExportFinished | ExportAborted | ImportOpened | ImportPlaced | ImportCancelled
)
