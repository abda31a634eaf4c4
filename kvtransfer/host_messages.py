"""What the ranks and the scheduler of one engine say to their worker host, and back.

A rank (and the scheduler-side connector) opens one DEALER socket to the host's ROUTER, over `ipc` in a
private directory. A plain vLLM server that loads the connector has no host; then none of this is sent.
"""

import msgspec


class RankReady(msgspec.Struct, tag="rank_ready", frozen=True):
    """Rank to host, once, when its KV caches are registered and its exporter socket is bound."""

    rank: int
    address: str
    """Where importers connect."""
    epoch: str
    fingerprint: str
    layout_fields: dict[str, str]
    num_blocks: int
    block_bytes: int
    """Bytes of one block over all layers of this rank."""
    pid: int


class ExportStarted(msgspec.Struct, tag="export_started", frozen=True):
    """Rank 0 to host: the engine scheduled the first chunk of this transfer's prefill."""

    transfer_id: str


class ImportClosed(msgspec.Struct, tag="import_closed", frozen=True):
    """Rank 0 to host: a hand-over ended, with the times the proxy reports. Bytes are those of rank 0 alone."""

    transfer_id: str
    outcome: str
    """`loaded`, `recompute` or `cancelled`."""
    failure_kind: str
    """Empty when loaded."""
    link: str
    bytes_moved: int
    num_tokens: int
    attached_to_done_s: float
    """From `Attach` until the exporter's `Done`: mostly the rest of the prefill."""
    done_to_loaded_s: float
    """From `Done` until the last byte was here, and verified if that is asked for: what the transfer added to the
    hand-over."""
    copy_s: float
    """Time spent copying, over all chunks."""
    bytes_left_at_done: int = 0
    """Of the blocks to move, what was still to be copied at `Done`."""


class RankStats(msgspec.Struct, tag="rank_stats", frozen=True):
    """Rank to host, at most once a second and only when something changed. Counters only grow."""

    rank: int
    exports_open: int
    imports_open: int
    bytes_in: dict[str, int]
    """Per link."""
    copy_s: dict[str, float]
    """Per link, seconds spent copying those bytes."""
    failures: dict[str, int]
    """Per kind, see `messages.FAILURE_KINDS`."""
    bad_frames: int
    peers: dict[str, str]
    """Per peer address: the link in use and why, or the reason of a refusal."""
    bytes_out: dict[str, int] = {}
    """Per link, what importers said they got, when they released."""
    copy_out_s: dict[str, float] = {}
    """Per link, seconds these importers spent copying those bytes."""
    leases: dict[str, int] = {}
    """Open exports by state, see `lease.LeaseState`."""


class PoolStats(msgspec.Struct, tag="pool_stats", frozen=True):
    """Scheduler to host, when a count changed. `free + used + leased == total` always holds."""

    total: int
    free: int
    used: int
    """Blocks referenced by live requests, counted from their block tables."""
    leased: int
    """Blocks held only by transfers of requests that have ended."""


class DropExports(msgspec.Struct, tag="drop_exports", frozen=True):
    """Host to every rank: nobody will fetch these; end their leases."""

    transfer_ids: list[str]


class HoldExports(msgspec.Struct, tag="hold_exports", frozen=True):
    """Host to every rank: the proxy still means to hand these over; renew their leases."""

    transfer_ids: list[str]


class FirstToken(msgspec.Struct, tag="first_token", frozen=True):
    """Host to every rank of a decode worker: the first token, as the proxy got it from the prefill worker."""

    transfer_id: str
    token: int


class MeetExporters(msgspec.Struct, tag="meet_exporters", frozen=True):
    """Host to every rank of a decode worker: get the links to these ready, before a request needs them."""

    workers: list[list[tuple[str, str]]]
    """Per prefill worker, (address, epoch) of its ranks, by rank."""


FromRank = RankReady | ExportStarted | ImportClosed | RankStats | PoolStats
ToRank = DropExports | HoldExports | FirstToken | MeetExporters
