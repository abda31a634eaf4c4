"""What the two halves of a pair (`nccl_pairs`) order from the device's thread (`nccl`), and what it reports."""

from dataclasses import dataclass
from typing import Any

from kvtransfer.layout import Region


@dataclass(frozen=True)
class PairId:
    """One communicator: a pair of ranks, in one generation."""

    peer: Any
    """Whoever is at the other end, as this side names it; hashable."""
    generation: int
    is_exporter: bool
    """This side's part; the exporter is NCCL's rank 0."""


@dataclass(frozen=True)
class Build:
    """Join a communicator; the exporter, without `unique_id`, first makes the id and reports it."""

    pair: PairId
    unique_id: bytes = b""


@dataclass(frozen=True)
class Abort:
    """Drop the communicator, whatever it is doing."""

    pair: PairId
    reason: str


@dataclass(frozen=True)
class Gather:
    """Collect blocks in a staging buffer."""

    pair: PairId
    fetch_id: int
    block_ids: tuple[int, ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Send:
    """Send what was gathered for that fetch."""

    pair: PairId
    fetch_id: int


@dataclass(frozen=True)
class Skip:
    """Forget what was gathered for that fetch."""

    pair: PairId
    fetch_id: int


@dataclass(frozen=True)
class Receive:
    """Receive the next send. Without blocks its bytes are dropped."""

    pair: PairId
    fetch_id: int
    num_bytes: int
    block_ids: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()


NcclOrder = Build | Abort | Gather | Send | Skip | Receive


@dataclass(frozen=True)
class IdMade:
    pair: PairId
    unique_id: bytes


@dataclass(frozen=True)
class Built:
    """It has carried a message; both sides have it."""

    pair: PairId


@dataclass(frozen=True)
class Broken:
    """It could not be built, or failed. It is being dropped already."""

    pair: PairId
    reason: str


@dataclass(frozen=True)
class Gathered:
    pair: PairId
    fetch_id: int


@dataclass(frozen=True)
class Sent:
    """Its staging buffer is free."""

    pair: PairId
    fetch_id: int


@dataclass(frozen=True)
class Received:
    """The end of every `Receive`: nothing writes into its blocks any more."""

    pair: PairId
    fetch_id: int
    reason: str
    """Empty when the blocks hold what was sent."""
    copy_s: float
    ended_s: float


NcclEvent = IdMade | Built | Broken | Gathered | Sent | Received
