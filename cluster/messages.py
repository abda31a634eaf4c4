"""What a worker host and a proxy say to each other.

Each host opens one DEALER socket per proxy and connects it to the proxy's ROUTER. Frame 0 is one
MessagePack struct from below. `Submit` and `Outputs` are followed by the frames that vLLM's own encoder
made of an `EngineCoreRequest` or an `EngineCoreOutputs` (tensors as frames of their own, never pickle).
"""

from typing import Annotated

import msgspec

from kvtransfer.wire import Count, Seconds, Size

PROTOCOL_VERSION = 3

MAX_BLOCKS_PER_MESSAGE = 1 << 15

BlockHashes = Annotated[list[Size], msgspec.Meta(max_length=MAX_BLOCKS_PER_MESSAGE)]
"""Of `cluster.prefix_events.block_hashes`."""

LEAVE = "leave"
"""A goal of draining: the worker's process ends. The other goals are the roles."""


Goal = Annotated[str, msgspec.Meta(pattern=r"^(leave|prefill|decode)\Z")]


class RankAddress(msgspec.Struct, frozen=True):
    """Where one rank of a worker exports KV blocks."""

    rank: Count
    address: str
    epoch: str


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine settled on after it started."""

    model: str
    max_model_len: Count
    block_size: Count
    num_blocks: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    tensor_parallel_size: Count
    dtype: str
    supported_tasks: list[str]
    prefix_events: bool = False
    """It tells what its prefix cache holds (`CacheEvents`)."""
    simulated: bool = False
    """There is no engine: a cost model takes its time and invents its tokens."""
    can_sleep: bool = False
    """It gives its device memory back when it is told to `sleep`, and has its weights again soon after `wake_up`."""


class WorkerHello(msgspec.Struct, tag="hello", frozen=True):
    """Host to proxy, when the engine is up; again after every reconnection, until `Welcome` comes, and when its role or
    `drains_to` changes. What it says of itself is the truth about it."""

    protocol: Count
    worker_id: str
    role: str
    """`prefill` or `decode`."""
    epoch: str
    proxies_lost: Count
    """How often it has dropped what it carried in this life, because it lost sight of a proxy or had no more time to
    drain. Equal: said again."""
    pid: Count
    hostname: str
    engine: EngineFacts
    ranks: list[RankAddress]
    fingerprint: str
    layout_fields: dict[str, str]
    drains_to: str = ""
    """Not empty: it wants no new requests. When it has nothing left it leaves (`LEAVE`) or serves in this role."""
    drain: Count = 0
    """How often it has begun to drain in this life: `NothingMore` is about one of these times."""


class WorkerLoad(msgspec.Struct, tag="load", frozen=True):
    """Host to proxy, every beat: the worker is alive, and this is what it carries."""

    worker_id: str
    epoch: str
    num_running: Count
    num_waiting: Count
    blocks_total: Count
    blocks_free: Count
    blocks_used: Count
    blocks_leased: Count
    exports_open: Count
    imports_open: Count
    bytes_in: dict[str, Size]
    copy_s: dict[str, Seconds]
    transfer_failures: dict[str, Size]
    bad_frames: Size
    peers: dict[str, str]
    bytes_out: dict[str, Size] = {}
    copy_out_s: dict[str, Seconds] = {}
    leases: dict[str, Size] = {}
    """By state, over all ranks: each of them holds a lease for every transfer."""
    tokens_computed: Size = 0
    """Of prompts and outputs, since the engine's start, also twice. While it grows the engine gets on."""
    refused: dict[str, Size] = {}
    """Connections that its ranks turned away, by reason (`kvtransfer.trust.door`)."""
    copies_in: dict[str, Size] = {}
    """Per link, messages or reads in which `bytes_in` came."""
    asleep: bool = False
    """The engine sleeps, or is on its way there or back."""


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """Host to proxy: one engine step; the frames of an `EngineCoreOutputs` follow."""

    epoch: str


class PrefillStarted(msgspec.Struct, tag="prefill_started", frozen=True):
    """Prefill host to proxy: the engine scheduled the first chunk of this transfer."""

    transfer_id: str


class HandoverClosed(msgspec.Struct, tag="handover_closed", frozen=True):
    """Decode host to proxy: see `kvtransfer.host_messages.ImportClosed`, of which this is the relay."""

    transfer_id: str
    outcome: str
    failure_kind: str
    link: str
    bytes_moved: Size
    num_tokens: Count
    attached_to_done_s: Seconds
    done_to_loaded_s: Seconds
    copy_s: Seconds
    bytes_left_at_done: Size = 0


class CacheEvents(msgspec.Struct, tag="cache_events", frozen=True):
    """Host to proxy: what changed in the engine's prefix cache, many times a second at most.

    Everything is told after `Welcome` and `TellCachedBlocks`, in as many messages as it takes, from number 0 on.
    """

    epoch: str
    seq: Size
    """Counts up by one. A proxy that misses a number asks for everything."""
    stored: BlockHashes
    removed: BlockHashes
    cleared: bool = False
    """Before anything else in this message: nothing is held of what was told so far."""
    known: bool = True
    """False: the host missed events of its engine, so more blocks may be held."""
    oddities: dict[str, Size] = {}
    """What the host noticed since the last message, by kind: see `docs/architecture.md`."""


class UtilityReply(msgspec.Struct, tag="utility_reply", frozen=True):
    """Host to proxy: the result of `Utility`, as plain MessagePack data."""

    call_id: Size
    error: str
    """Empty on success."""
    result: msgspec.Raw


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """Host to proxy: this worker is leaving, and why; its unfinished requests are lost."""

    worker_id: str
    epoch: str
    reason: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Proxy to host, answer to `WorkerHello`."""

    proxy_epoch: str


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """Proxy to host: this worker cannot join (wrong model, protocol, duplicate id); it exits with the reason."""

    reason: str


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Proxy to host: run this; the frames of an `EngineCoreRequest` follow."""

    engine_request_id: str


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Proxy to host."""

    engine_request_ids: list[str]


class DropTransfers(msgspec.Struct, tag="drop_transfers", frozen=True):
    """Proxy to a prefill host: nobody will fetch these."""

    transfer_ids: list[str]


class HoldTransfers(msgspec.Struct, tag="hold_transfers", frozen=True):
    """Proxy to a prefill host, every lease beat: these hand-overs are still wanted."""

    transfer_ids: list[str]


class FirstToken(msgspec.Struct, tag="first_token", frozen=True):
    """Proxy to a decode host: the token that the prefill worker sampled."""

    transfer_id: str
    token: Count


class MeetExporters(msgspec.Struct, tag="meet_exporters", frozen=True):
    """Proxy to a decode host, when it or a prefill worker joins: make ready for what these will hand over."""

    workers: list[list[RankAddress]]
    """Of each prefill worker, its ranks."""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Proxy to host: finish what you have, then leave or take another role. The answer is a hello."""

    goal: Goal
    """`LEAVE`, `prefill` or `decode`; the role it has ends a drain towards the other one."""
    timeout_s: Seconds
    """What is not finished by then is aborted."""


class NothingMore(msgspec.Struct, tag="nothing_more", frozen=True):
    """Proxy to a draining host: all that was placed on you has ended, and nothing new will come."""

    drain: Count
    """As in the host's hello."""


class TellCachedBlocks(msgspec.Struct, tag="tell_cached_blocks", frozen=True):
    """Proxy to host: some `CacheEvents` did not arrive; tell everything anew."""


class Utility(msgspec.Struct, tag="utility", frozen=True):
    """Proxy to host: call a method of the engine core; only names in `ALLOWED_UTILITIES`."""

    call_id: Size
    method: str
    args: msgspec.Raw


class ProxyBeat(msgspec.Struct, tag="proxy_beat", frozen=True):
    """Proxy to host, every beat. A host that hears none for `proxy_lost_after_s` drops that proxy's requests."""

    proxy_epoch: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Proxy to host: leave now, within `grace_s`."""

    grace_s: Seconds


ALLOWED_UTILITIES = frozenset(
    {
        "reset_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "sleep",
        "wake_up",
        "is_sleeping",
        "profile",
        "add_lora",
        "remove_lora",
        "list_loras",
        "pin_lora",
    }
)

FromWorker = WorkerHello | WorkerLoad | Outputs | PrefillStarted | HandoverClosed | CacheEvents | UtilityReply | Goodbye
ToWorker = (
    Welcome
    | Rejected
    | Submit
    | Abort
    | DropTransfers
    | HoldTransfers
    | FirstToken
    | MeetExporters
    | Drain
    | NothingMore
    | TellCachedBlocks
    | Utility
    | ProxyBeat
    | Shutdown
)
