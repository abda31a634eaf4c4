"""What `GET /twinpool/status` answers: the proxy writes it, `twinpool status` and the demonstration read it."""

import msgspec

from cluster.orders import RollingStatus


class BlockCounts(msgspec.Struct, frozen=True):
    """KV blocks of one worker; `free + used + leased == total`."""

    total: int = 0
    free: int = 0
    used: int = 0
    leased: int = 0


class LaunchNote(msgspec.Struct, frozen=True):
    """What the launcher says about a worker whose process has ended in this run."""

    starting: bool
    """It is being started again, or will be."""
    text: str
    """What happens next; empty when it is back."""
    starts: int
    """How often it was started again."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as the proxy sees it."""

    worker_id: str
    role: str
    state: str
    """`starting` (also again), `ready`, `asleep`, `draining`, `drained` (it left when it was told to) or `dead`."""
    cause: str = ""
    """Why it is dead or drained."""
    note: str = ""
    """What the launcher does about that."""
    starts: int = 0
    """How often its process was started again."""
    drains_to: str = ""
    """What a draining worker does next: `leave`, or serve as `prefill` or `decode`."""
    epoch: str = ""
    pid: int = 0
    hostname: str = ""
    running: int = 0
    waiting: int = 0
    blocks: BlockCounts = BlockCounts()
    exports_open: int = 0
    imports_open: int = 0
    leases: dict[str, int] = {}
    """Of exported blocks, by state: `computing`, `unwanted`, `held`, `ending`. One per transfer and rank."""
    transfer_failures: dict[str, int] = {}
    """That its ranks saw since its start, by kind."""
    heard_ago_s: float = 0.0
    peers: dict[str, str] = {}
    """Per peer address: the link in use and why, or the reason of a refusal."""
    prefix_events: str = ""
    """What its prefix cache holds is `known`, `unknown` (events are missing), or not told (`off`)."""
    simulated: bool = False
    """It has no engine: a cost model takes its time and invents its tokens."""


class ApiServerStatus(msgspec.Struct, frozen=True):
    """One API server process besides the one that has the workers."""

    name: str
    state: str
    """`starting`, `ready` or `dead`."""
    pid: int = 0
    requests: int = 0
    """That it carries now."""
    note: str = ""
    """What the launcher does about its end."""


class LinkStatus(msgspec.Struct, frozen=True):
    """Everything that moved over one kind of link since the start, over all decode workers."""

    link: str
    bytes_moved: int = 0
    copy_s: float = 0.0


class LastRequest(msgspec.Struct, frozen=True):
    """The last request that was prefilled on a prefill worker. None: not known yet."""

    prompt_tokens: int = 0
    ttft_s: float | None = None
    handover_s: float | None = None
    """From the end of the prefill until the decode worker held every block."""
    bytes_moved: int | None = None
    link: str | None = None
    outcome: str | None = None
    """`loaded`, `recompute` or `cancelled`."""
    request_id: str = ""


class RefusedPair(msgspec.Struct, frozen=True):
    """Two workers that are never placed together: their KV caches cannot be copied into each other."""

    prefill: str
    decode: str
    differing_fields: list[str]
    """`name (value of the prefill worker / value of the decode worker)`."""


class ClassStatus(msgspec.Struct, frozen=True):
    """Requests of one class that have ended since the start."""

    name: str
    ttft_s: float
    itl_s: float
    outcomes: dict[str, int] = {}
    """`attained`, `missed_ttft`, `missed_itl`, `missed_both`, `rejected`, `failed`, `aborted`."""


class AdapterStatus(msgspec.Struct, frozen=True):
    """One LoRA adapter."""

    name: str
    path: str
    number: int
    """The same at every worker."""
    leaving: bool = False
    """It was removed; requests with it still run."""
    lacking: dict[str, str] = {}
    """Living workers that get no requests with it, and why."""


class AutoscaleStatus(msgspec.Struct, frozen=True):
    """What the autoscaler thinks."""

    want: dict[str, int] = {}
    """Workers by pool; empty before its first look."""
    last_reason: str = ""
    """Why it changed a pool last."""
    warnings: list[str] = []
    """What more workers cannot help, or what stands against more."""


class ClusterStatus(msgspec.Struct, frozen=True):
    """The whole answer."""

    model: str
    requests_running: int = 0
    requests_waiting: int = 0
    workers: list[WorkerStatus] = []
    links: list[LinkStatus] = []
    transfers: dict[str, int] = {}
    """Hand-overs by outcome: loaded, recompute, cancelled."""
    transfer_failures: dict[str, int] = {}
    """By failure kind."""
    last_request: LastRequest | None = None
    refused_pairs: list[RefusedPair] = []
    classes: list[ClassStatus] = []
    rolling_restart: RollingStatus | None = None
    """The last one of this run."""
    api_servers: list[ApiServerStatus] = []
    """Those besides the first one, if there are any."""
    autoscale: AutoscaleStatus | None = None
    """None: nobody scales but the operator."""
    adapters: list[AdapterStatus] = []
    connections_refused: dict[str, dict[str, int]] = {}
    """By who listened (`proxy`, or a worker's id) and reason (`kvtransfer.trust.door`)."""
    sleep: str = "awake"
    """`awake`, `falling asleep`, `asleep` or `waking`."""
