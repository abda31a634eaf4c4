"""What two ranks say to each other about one KV transfer.

The *importer* is a rank of a decode worker, the *exporter* a rank of a prefill worker. An importer opens
one DEALER socket per exporter and connects it to the exporter's ROUTER; every message is one MessagePack
struct in one frame, except `Blocks`, whose payload follows in a second frame. The order of a transfer:

    importer                                   exporter
    Hello      ------------------------------>            once per pair, and after a restart of either
               <------------------------------ Welcome    (or Refused)
    Attach     ------------------------------>            as soon as the request reaches the decode worker
               <------------------------------ Attached
               <------------------------------ Ready      after each chunk of the prefill; if the exporter is told to
                                                          announce layers, also within the last one
    Fetch      ------------------------------>            only on links where the exporter sends (zmq, nccl)
               <------------------------------ Blocks     on zmq, with the bytes
               <------------------------------ Sending    on nccl: the bytes come through the communicator
               <------------------------------ Done       prefill finished; carries the first token
    Check      ------------------------------>            only if the importer verifies: once it has all blocks
               <------------------------------ Checksums  of those blocks
    Release    ------------------------------>            everything needed was copied, and is as it should be
    Beat       ------------------------------>            every few seconds, renews all leases held
               <------------------------------ BeatAck
    Failed     <----------------------------->            either side gives up; the other must stop

On the link `nccl` the pair needs a communicator, from the moment it meets until it breaks, one *generation* after
the other:

    CommRequest ----------------------------->            after Welcome, and to replace one that is gone
                <----------------------------- CommOffer  with NCCL's unique id; both sides join at once
    CommBroken  <---------------------------->            either side dropped it; the other must too

Exactly one NCCL receive belongs to each `Sending`, of that size and in that order: its number is counted per
generation, and anything else than the next one breaks the communicator. The importer posts the receive when
`Sending` comes, so that no kernel waits on its GPU for blocks that are still being gathered, and does so even for
blocks that it no longer wants. A `Fetch` of a generation that is over gets no answer; the importer repeats it.

Where the two workers differ in their number of ranks, an importer does this with each exporter that holds some of its
heads, and an exporter with each importer that needs some of its own; `Attach` tells it how many those are.

`transfer_id` is minted by the proxy. `epoch` names one life of one process: a message for another epoch
is refused, so a restarted peer on the same address is a new peer.
"""

import msgspec

from kvtransfer.resharding.forms import CacheForm
from kvtransfer.wire import Count, Seconds, Size


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Importer to exporter, first message on a connection."""

    epoch: str
    """Boot epoch of the importer."""
    rank: Count
    fingerprint: str
    """`CacheLayout.fingerprint()` of the importer; an equal one needs no comparison of fields."""
    layout_fields: dict[str, str]
    """The fields behind the fingerprint: they decide whether the pair is compatible, and name what forbids it."""
    host_id: str
    """Names the machine; equal on both sides when they share memory."""
    links: list[str]
    """Links the importer can use, best first. A later `Hello` without one of them asks for another choice."""
    exporter_epoch: str
    """Of the exporter that is meant; another one on its address refuses."""
    pid: Count
    """Of the importer, so that an exporter on the same machine learns at once of its death."""
    device: str = "cpu"
    """Where the importer's KV cache lies: `cpu`, or the PCI address of its GPU."""
    nccl_version: Count = 0
    """Of the importer; both sides need the same. 0 without NCCL."""
    unusable: dict[str, str] = {}
    """Links that are configured but cannot be used by the importer, and why."""
    form: CacheForm | None = None
    """How the importer's cache lies in memory; None if it goes only to an equal one, rank by rank."""


class MemoryRegion(msgspec.Struct, frozen=True):
    """The first run of every block of one layer, as it lies in the exporter's address space; with a `form`, further
    runs of the region follow from it."""

    base_address: Size
    block_stride_bytes: Size
    num_blocks: Count


class SharedAllocation(msgspec.Struct, frozen=True):
    """One CUDA allocation of the exporter that holds KV caches."""

    base_address: Size
    """In the exporter's address space; the regions lie from there on."""
    num_bytes: Size
    handle: bytes
    """CUDA's IPC handle of it."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Exporter to importer, answer to `Hello`."""

    epoch: str
    rank: Count
    link: str
    """The link chosen for this pair."""
    why: str
    """Why that link, in words for the log and `twinpool status`."""
    pid: Count
    regions: list[MemoryRegion]
    """What this pair shares, one per region of each layer, in order. Empty unless the link reads the exporter's memory.
    """
    allocations: list[SharedAllocation] = []
    """On the link `cuda_ipc`, the allocations that the regions lie in."""
    form: CacheForm | None = None
    """How the exporter's cache lies in memory; both sides compute from both forms what the pair shares."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Exporter to importer: this pair may not exchange blocks."""

    epoch: str
    """Of the exporter. Another one than the importer meant is the whole reason: the exporter was restarted."""
    reason: str
    differing_fields: list[str]


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Importer to exporter: a request that needs this transfer has arrived here."""

    transfer_id: str
    exporter_epoch: str
    num_tokens: Count
    """Prompt length, for comparison with the exporter's own."""
    prompt_hash: bytes
    wants_first_token: bool
    importers_expected: Count = 1
    """Ranks of the decode worker that attach to this exporter for this transfer; it waits for a release of each."""


class Attached(msgspec.Struct, tag="attached", frozen=True):
    """Exporter to importer: the lease is yours until `lease_until_s` on the exporter's monotonic clock."""

    transfer_id: str
    lease_until_s: Seconds


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Exporter to importer: the KV of `num_tokens` prompt tokens is computed, or that of their first layers."""

    transfer_id: str
    attempt: Count
    """Raised when the exporter had to start over (preemption); what was copied before is void."""
    first_block: Count
    """Position, in token order, of `block_ids[0]`; earlier blocks were named by earlier messages."""
    block_ids: list[Count]
    num_tokens: Count
    num_layers: Count | None = None
    """Only so many of the first layers are computed, except of the tokens that an earlier message without this counted,
    of which all are. The blocks can be fetched as far as they are computed, the prompt's last one too."""


class Done(msgspec.Struct, tag="done", frozen=True):
    """Exporter to importer: the prefill ended. All blocks have been named by `Ready` before."""

    transfer_id: str
    attempt: Count
    num_tokens: Count
    prompt_hash: bytes
    first_token: Count | None


class Fetch(msgspec.Struct, tag="fetch", frozen=True):
    """Importer to exporter: send these blocks of these layers. Its size is the importer's credit.

    Of each block it gets the heads that the pair shares. Where block sizes differ, the ids are those of units, see
    `resharding.shares`.
    """

    transfer_id: str
    attempt: Count
    """Of the `Ready` that named the blocks; a fetch of an attempt that is over gets no answer."""
    fetch_id: Size
    first_layer: Count
    num_layers: Count
    block_ids: list[Count]
    """The exporter's ids."""
    generation: Size = 0
    """On the link `nccl`, of the communicator to send through."""


class CommRequest(msgspec.Struct, tag="comm_request", frozen=True):
    """Importer to exporter: offer a communicator; an earlier generation is over."""

    generation: Size
    staging_bytes: Size
    """Size of each of the importer's two staging buffers."""


class CommOffer(msgspec.Struct, tag="comm_offer", frozen=True):
    """Exporter to importer: join it as rank 1 now."""

    generation: Size
    staging_bytes: Size
    """Size of each of the exporter's two; no `Fetch` may take more than the smaller ones hold."""
    unique_id: bytes
    """NCCL's."""


class CommBroken(msgspec.Struct, tag="comm_broken", frozen=True):
    """Either way: this communicator is not to be used any more."""

    generation: Size
    reason: str
    is_failure: bool
    """False when it was given up because others needed its place."""


class Sending(msgspec.Struct, tag="sending", frozen=True):
    """Exporter to importer: the blocks of this fetch are being sent through the communicator."""

    generation: Size
    sequence: Size
    """Counts the sends of this generation from 0."""
    fetch_id: Size
    num_bytes: Size


class Blocks(msgspec.Struct, tag="blocks", frozen=True):
    """Exporter to importer; the second frame holds the bytes, layer by layer, run by run, block by block."""

    transfer_id: str
    fetch_id: Size
    num_bytes: Size


class Check(msgspec.Struct, tag="check", frozen=True):
    """Importer to exporter, after `Done`: send the checksums of these blocks as the prefill left them.

    One at a time per transfer. The lease keeps the blocks as they are until the release, so an importer that gets an
    answer and still holds the lease compares with what it was meant to copy.
    """

    transfer_id: str
    attempt: Count
    """Of the `Done`."""
    check_id: Size
    block_ids: list[Count]
    """The exporter's ids, or those of units, as in `Fetch`; at most `MAX_CHECK_BLOCKS`."""


class Checksums(msgspec.Struct, tag="checksums", frozen=True):
    """Exporter to importer, answer to `Check`. See `verification.checksums` for what they are computed over."""

    transfer_id: str
    check_id: Size
    values: list[Size]
    """One CRC-32 per block, over all layers of what the pair shares of it."""


class Release(msgspec.Struct, tag="release", frozen=True):
    """Importer to exporter: nothing more will be read. The exporter may free the blocks."""

    transfer_id: str
    bytes_moved: Size = 0
    """What it got of this exporter, for the exporter's statistics: it cannot see reads of its memory."""
    copy_s: Seconds = 0.0
    """Spent copying them."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Either way: this transfer is over. The receiver stops and, if importer, answers with `Release`."""

    transfer_id: str
    kind: str
    """One of `FAILURE_KINDS`."""
    reason: str


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """Importer to exporter: still alive, still wanting these transfers."""

    transfer_ids: list[str]


class BeatAck(msgspec.Struct, tag="beat_ack", frozen=True):
    """Exporter to importer: `transfer_ids` are held until `lease_until_s`; `unknown_ids` are gone."""

    lease_until_s: Seconds
    transfer_ids: list[str]
    unknown_ids: list[str]


FAILURE_KINDS = (
    "transport",
    "lease_expired",
    "refused",
    "mismatch",
    "aborted",
    "peer_lost",
    "unknown_transfer",
    "checksum",
)
MAX_CHECK_BLOCKS = 4096

FromImporter = Hello | Attach | Fetch | Check | Release | Failed | Beat | CommRequest | CommBroken
FromExporter = (
    Welcome
    | Refused
    | Attached
    | Ready
    | Done
    | Blocks
    | Checksums
    | Failed
    | BeatAck
    | CommOffer
    | CommBroken
    | Sending
)
