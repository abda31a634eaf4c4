"""What the measuring process and the two processes of a pair say to each other: a line of JSON each."""

import msgspec

from lab.links.shapes import BlockShape


class Transfer(msgspec.Struct, frozen=True):
    """Block `source_ids[i]` of the exporter goes to block `target_ids[i]` of the importer, over all layers."""

    name: str
    source_ids: list[int]
    target_ids: list[int]


class Setup(msgspec.Struct, tag=True):
    """The first message to either process: what to allocate, and which arms it has a side of."""

    is_exporter: bool
    shape: BlockShape
    num_blocks: int
    arms: list[str]
    directory: str
    """For ipc sockets."""
    device: int | None = None
    """The GPU that the cache lies on; None for CPU memory."""
    offers: dict[str, dict[str, str]] = {}
    """Of the exporter's arms; empty in its own setup."""


class Offer(msgspec.Struct, tag=True):
    """To the exporter: have these ready to be read."""

    arm: str
    transfers: list[Transfer]


class Withdraw(msgspec.Struct, tag=True):
    """To the exporter: what was offered and not taken is not wanted any more."""

    arm: str


class Move(msgspec.Struct, tag=True):
    """To the importer: copy these at once, and check them."""

    arm: str
    transfers: list[Transfer]
    timeout_s: float


class Queue(msgspec.Struct, tag=True):
    """To the importer: start `large`, if any, and copy `small` one after the other, `pause_s` apart, while it runs."""

    arm: str
    large: Transfer | None
    small: list[Transfer]
    pause_s: float
    timeout_s: float


class Ready(msgspec.Struct, tag=True):
    """Set up. `unusable`: arms that cannot run here, and why."""

    offers: dict[str, dict[str, str]]
    unusable: dict[str, str]


class Done(msgspec.Struct, tag=True):
    """Offered, or withdrawn."""


class Moved(msgspec.Struct, tag=True):
    """Everything arrived and is what the exporter has."""

    seconds: float


class Queued(msgspec.Struct, tag=True):
    large_s: float
    small_s: list[float]
    """Of those that were issued before the large one had ended."""


class Failed(msgspec.Struct, tag=True):
    """The order was not carried out."""

    reason: str


ToProcess = Setup | Offer | Withdraw | Move | Queue
FromProcess = Ready | Done | Moved | Queued | Failed
