"""One request inside a simulated engine."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cluster.prefix_events.block_hashes import root
from cluster.simulated.engine.vllm_frames import Request, Sampling, adapter_of


class Place(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    IMPORTING = "importing"
    """Its blocks are reserved, their content is on the way."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """The prompt's blocks are to be kept for another worker."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """The prompt's blocks come from another worker."""

    transfer_id: str
    first_token: bool
    """The prompt ends in a placeholder for it."""
    address: str
    """Of the exporter's process, and the life it is expected to live."""
    epoch: str


class TransferParamsUnreadable(ValueError):
    """`kv_transfer_params` that no proxy of this version writes."""


def transfer_of(sampling: Sampling) -> ExportOrder | ImportOrder | None:
    """What the proxy asked for; raises `TransferParamsUnreadable`."""
    raw: Any = (sampling.extra_args or {}).get("kv_transfer_params")
    if not raw:
        return None
    try:
        if raw["mode"] == "export":
            return ExportOrder(str(raw["transfer_id"]))
        if raw["mode"] == "import":
            rank = raw["exporter"]["ranks"][0]
            address, epoch = str(rank["address"]), str(rank["epoch"])
            return ImportOrder(str(raw["transfer_id"]), bool(raw["first_token"]), address, epoch)
        raise TransferParamsUnreadable(f"mode must be export or import, found {raw['mode']!r}")
    except (KeyError, IndexError, TypeError) as error:
        raise TransferParamsUnreadable(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with everything that was computed for it."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    root: int
    """What its blocks' hashes begin with: LoRA adapter and cache salt."""
    arrived_s: float
    urgency: tuple[float, int]
    """Deadline of the first token where the proxy gave one, then the order of arrival."""
    transfer: ExportOrder | ImportOrder | None = None
    place: Place = Place.WAITING
    num_computed: int = 0
    table: list[int] = field(default_factory=list)  # one per KV block, in token order
    hashes: list[int] = field(default_factory=list)  # one per full block of `tokens`
    num_named: int = 0
    """Blocks of the table that the prefix cache was told of."""
    state: int | None = None
    """What the next token depends on; None until the prompt is known."""
    num_output: int = 0
    num_cached: int = 0
    num_imported: int = 0
    import_over: bool = False
    """From here on it is an ordinary local request."""
    export_open: bool = False
    scheduled_s: float | None = None
    num_preempted: int = 0
    stats_told: bool = False

    @property
    def is_import(self) -> bool:
        return isinstance(self.transfer, ImportOrder) and not self.import_over

    @property
    def wants_whole_prompt(self) -> bool:
        """It must be computed even if it is known: its scores are asked for."""
        return self.sampling.prompt_logprobs is not None or bool(self.sampling.skip_reading_prefix_cache)

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_to_import(self) -> int:
        """Tokens whose KV the exporter computes."""
        holds_placeholder = isinstance(self.transfer, ImportOrder) and self.transfer.first_token
        return self.num_prompt_tokens - 1 if holds_placeholder else self.num_prompt_tokens


def _deadline_s(sampling: Sampling, now_s: float) -> float:
    """When the proxy wants the first token; without its word, after all for which it gave one."""
    urgency: Any = (sampling.extra_args or {}).get("twinpool")
    left_s = urgency.get("ttft_left_s") if isinstance(urgency, dict) else None
    return now_s + left_s if isinstance(left_s, int | float) else math.inf


def sequence_of(request: Request, number: int, now_s: float) -> Sequence:
    """Raises `TransferParamsUnreadable`; and `ValueError` for a request that is no text generation."""
    sampling, tokens = request.sampling_params, request.prompt_token_ids
    if sampling is None or not tokens:
        raise ValueError("a simulated engine only generates text from token ids")
    transfer = transfer_of(sampling)
    made = Sequence(
        request.request_id,
        list(tokens),
        len(tokens),
        sampling,
        root(adapter_of(request), request.cache_salt or ""),
        now_s,
        (_deadline_s(sampling, now_s), number),
        transfer,
    )
    if isinstance(transfer, ImportOrder) and made.num_to_import < 1:
        raise TransferParamsUnreadable("an import needs a prompt of at least one token")
    return made
