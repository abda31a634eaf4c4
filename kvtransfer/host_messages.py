"""What the ranks and the scheduler of one engine say to their worker host, and back.

A rank (and the scheduler-side connector) opens one DEALER socket to the host's ROUTER, over `ipc` in a
private directory. A plain vLLM server that loads the connector has no host; then none of this is sent.
"""

import msgspec

from kvtransfer.wire import Count, Seconds, Size


class RankReady(msgspec.Struct, tag="rank_ready", frozen=True):
    """Rank to host, once, when its KV caches are registered and its exporter socket is bound."""

    rank: Count
    address: str
    """Where importers connect."""
    epoch: str
    fingerprint: str
    layout_fields: dict[str, str]
    num_blocks: Count
    block_bytes: Size
    """Bytes of one block over all layers of this rank."""
    pid: Count


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
    bytes_moved: Size
    num_tokens: Count
    attached_to_done_s: Seconds
    """From `Attach` until the exporter's `Done`: mostly the rest of the prefill."""
    done_to_loaded_s: Seconds
    """From `Done` until the last byte was here, and verified if that is asked for: what the transfer added to the
    hand-over."""
    copy_s: Seconds
    """Time spent copying, over all chunks."""
    bytes_left_at_done: Size = 0
    """Of the blocks to move, what was still to be copied at `Done`."""


class RankStats(msgspec.Struct, tag="rank_stats", frozen=True):
    """Rank to host, at most once a second and only when something changed. Counters only grow."""

    rank: Count
    exports_open: Count
    imports_open: Count
    bytes_in: dict[str, Size]
    """Per link."""
    copy_s: dict[str, Seconds]
    """Per link, seconds spent copying those bytes."""
    failures: dict[str, Size]
    """Per kind, see `messages.FAILURE_KINDS`."""
    bad_frames: Size
    peers: dict[str, str]
    """Per peer address: the link in use and why, or the reason of a refusal."""
    bytes_out: dict[str, Size] = {}
    """Per link, what importers said they got, when they released."""
    copy_out_s: dict[str, Seconds] = {}
    """Per link, seconds these importers spent copying those bytes."""
    leases: dict[str, Size] = {}
    """Open exports by state, see `lease.LeaseState`."""
    refused: dict[str, Size] = {}
    """Connections turned away at the exporter's socket, by reason (`trust.door`)."""
    copies_in: dict[str, Size] = {}
    """Per link, messages or reads in which `bytes_in` came."""


class PoolStats(msgspec.Struct, tag="pool_stats", frozen=True):
    """Scheduler to host, when a count changed. `free + used + leased == total` always holds."""

    total: Count
    free: Count
    used: Count
    """Blocks referenced by live requests, counted from their block tables."""
    leased: Count
    """Blocks held only by transfers of requests that have ended."""
    tokens_computed: Size = 0
    """By all steps so far, chunks of prompts and tokens alike; empty steps add nothing."""


class DropExports(msgspec.Struct, tag="drop_exports", frozen=True):
    """Host to every rank: nobody will fetch these; end their leases."""

    transfer_ids: list[str]


class HoldExports(msgspec.Struct, tag="hold_exports", frozen=True):
    """Host to every rank: the proxy still means to hand these over; renew their leases."""

    transfer_ids: list[str]


class FirstToken(msgspec.Struct, tag="first_token", frozen=True):
    """Host to every rank of a decode worker: the first token, as the proxy got it from the prefill worker."""

    transfer_id: str
    token: Count


class MeetExporters(msgspec.Struct, tag="meet_exporters", frozen=True):
    """Host to every rank of a decode worker: get the links to these ready, before a request needs them."""

    workers: list[list[tuple[str, str]]]
    """Per prefill worker, (address, epoch) of its ranks, by rank."""


FromRank = RankReady | ExportStarted | ImportClosed | RankStats | PoolStats
ToRank = DropExports | HoldExports | FirstToken | MeetExporters
