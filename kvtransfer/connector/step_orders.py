"""What the scheduler side of the connector tells every rank in one engine step, and hears back.

Plain dataclasses without vLLM: they travel inside the engine's own step messages.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpenExport:
    """A prefill whose KV somebody will fetch was scheduled for the first time."""

    transfer_id: str
    request_id: str
    prompt_hash: bytes
    num_prompt_tokens: int


@dataclass(frozen=True)
class AnnounceBlocks:
    """After this step's forward pass the KV of `num_tokens` prompt tokens is in `block_ids`."""

    transfer_id: str
    block_ids: list[int]  # every block so far, in token order
    num_tokens: int
    is_last: bool = False
    """The prompt ends with this step."""


@dataclass(frozen=True)
class FinishExport:
    """The prefill ended with `first_token`; its blocks stay until the lease ends."""

    transfer_id: str
    block_ids: list[int]
    num_tokens: int
    first_token: int


@dataclass(frozen=True)
class AbortExport:
    """The prefill ended without a hand-over; blocks are freed as soon as nobody reads them."""

    transfer_id: str
    reason: str


@dataclass(frozen=True)
class OpenImport:
    """A request that continues somebody else's prefill arrived."""

    transfer_id: str
    request_id: str
    rank_addresses: list[tuple[str, str]]  # (address, epoch) of the exporter's ranks, by rank
    prompt_hash: bytes
    num_tokens: int
    wants_first_token: bool
    priority: int = 0


@dataclass(frozen=True)
class PlaceImport:
    """The importer's blocks for the positions from `first_block` on.

    `awaited` tells whether the scheduler parked the request until the import is reported as received;
    an import without blocks (everything cached, only the first token is missing) is not.
    """

    transfer_id: str
    first_block: int
    block_ids: list[int]
    awaited: bool


@dataclass
class StepOrders:
    """Orders of one step. All but `announcements` are carried out before the forward pass, and those after it, or, of
    prompts that end, within it as layers are computed."""

    open_exports: list[OpenExport] = field(default_factory=list)
    restart_exports: list[str] = field(default_factory=list)
    finish_exports: list[FinishExport] = field(default_factory=list)
    abort_exports: list[AbortExport] = field(default_factory=list)
    open_imports: list[OpenImport] = field(default_factory=list)
    place_imports: list[PlaceImport] = field(default_factory=list)
    cancel_imports: list[str] = field(default_factory=list)
    announcements: list[AnnounceBlocks] = field(default_factory=list)
    no_forward: bool = False
    """Nothing is computed in this step; the rank may wait a moment for a transfer instead of spinning."""


@dataclass(frozen=True)
class ClosedRequest:
    """What a rank reports of an import that ended, for the scheduler side."""

    request_id: str
    first_token: int | None
    loaded: bool


def hash_prompt(token_ids: Sequence[int], adapter: str = "") -> bytes:
    """A digest that P and D compute alone and compare, so that D never starts on another prompt's KV.

    `adapter`: which weights beside the model's computed it; empty for the model alone.
    """
    person = hashlib.blake2b(adapter.encode(), digest_size=16).digest() if adapter else b""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16, person=person).digest()


@dataclass(frozen=True)
class ExportParams:
    """`kv_transfer_params` of a request whose KV will be handed over."""

    transfer_id: str

    @staticmethod
    def parse(params: dict[str, Any]) -> "ExportParams":
        """Raises ValueError naming the field that is missing or wrong."""
        return ExportParams(transfer_id=_require_id(params))


@dataclass(frozen=True)
class ImportParams:
    """`kv_transfer_params` of a request that continues a prefill made elsewhere."""

    transfer_id: str
    first_token: bool
    """The prompt ends in a placeholder for the token that the exporter samples."""
    rank_addresses: list[tuple[str, str]]  # (address, epoch), by rank
    priority: int = 0
    """Where links are busy, lower is copied first."""

    @staticmethod
    def parse(params: dict[str, Any]) -> "ImportParams":
        """Raises ValueError naming the field that is missing or wrong."""
        try:
            ranks = sorted(params["exporter"]["ranks"], key=lambda rank: int(rank["rank"]))
            addresses = [(str(rank["address"]), str(rank["epoch"])) for rank in ranks]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "kv_transfer_params.exporter must be {'ranks': [{'rank', 'address', 'epoch'}, ...]}, "
                f"found {params.get('exporter')!r}"
            ) from error
        if not addresses:
            raise ValueError("kv_transfer_params.exporter.ranks is empty: there is nobody to import from")
        priority = params.get("priority", 0)
        if not isinstance(priority, int):
            raise ValueError(f"kv_transfer_params.priority must be a whole number, found {priority!r}")
        return ImportParams(_require_id(params), bool(params.get("first_token", False)), addresses, priority)


def _require_id(params: dict[str, Any]) -> str:
    transfer_id = params.get("transfer_id")
    if not isinstance(transfer_id, str) or not 8 <= len(transfer_id) <= 64:
        raise ValueError(
            f"kv_transfer_params.transfer_id must be a string of 8 to 64 characters, found {transfer_id!r}"
        )
    return transfer_id
