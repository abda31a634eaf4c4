"""What the parts of the Ray launcher say to each other, as lines of JSON over private pipes.

    RayLauncher (in `twinpool serve`) ── socket pair ── driver ── Ray ── actor ── pipes ── keeper ── the worker

The driver is the process that is connected to Ray. It hands `WorkerJob` and `KeeperTold` through unread.
"""

import msgspec

MAX_LINE_BYTES = 32 << 20
"""A settings document holds what an operator wrote, and for simulated workers a vocabulary."""


class Claim(msgspec.Struct, frozen=True):
    """What one worker claims from Ray, all of it on one node; or several times that, each on any node."""

    gpus: float = 0.0
    cpus: float = 0.0
    others: dict[str, float] = {}
    parts: int = 1
    """How many times; with more than one, the ranks claim them, and the actor beside the first nothing."""


class RayGroup(msgspec.Struct, frozen=True):
    """The placement group of a worker whose ranks may be on several nodes."""

    address: str
    """HOST:PORT of the Ray cluster's head."""
    group_id: str
    """In hexadecimal digits."""


class WorkerJob(msgspec.Struct, frozen=True):
    """How to start a worker on whatever node it gets."""

    worker_id: str
    """Of the first worker in the process."""
    role: str
    workers: list[tuple[str, str]]
    """Id and role of all of them."""
    module: str
    """`python -m MODULE SETTINGS`."""
    settings: str
    """The settings document; the keeper replaces the directory and the address that belong to its node."""
    env: dict[str, str]
    """On top of the node's environment."""
    run_id: str
    """The same for all workers of a cluster run."""
    across_nodes: bool = False
    """Its ranks are Ray actors of their own, in its placement group."""


# ------------------------------------------------------------------------------------ launcher → driver


class Wanted(msgspec.Struct, frozen=True):
    """One worker to start."""

    job: WorkerJob
    claim: Claim


class Start(msgspec.Struct, frozen=True, tag=True):
    """Claims room for all of them, where that has not been done, and starts each as soon as it has room."""

    workers: list[Wanted]


class End(msgspec.Struct, frozen=True, tag=True):
    """Ends a worker; its claim is kept for the next start."""

    worker_id: str
    grace_s: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """Gives back the claim of a worker that will not be started again."""

    worker_id: str


class EndAll(msgspec.Struct, frozen=True, tag=True):
    """Ends everything and leaves. So does the end of the line, with a short grace."""

    grace_s: float


ToDriver = Start | End | Release | EndAll

# ------------------------------------------------------------------------------------ driver → launcher


class Connected(msgspec.Struct, frozen=True, tag=True):
    """Ray is there."""

    node_ip: str
    """This machine's address, as other nodes reach it."""


class NoRay(msgspec.Struct, frozen=True, tag=True):
    """Ray cannot be used; the driver leaves."""

    reason: str


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Ray has no room for some workers yet."""

    text: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker's process exists."""

    worker_id: str
    pid: int
    node_ip: str
    log: str
    """Its path on that node."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    worker_id: str
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker's process ended. What its engine left behind is being ended."""

    worker_id: str
    returncode: int
    last_lines: list[str]
    cause: str = ""
    """If it was not the process that ended but its actor or its node; empty: the code and the lines tell."""


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left of the worker's process, as far as can be known."""

    worker_id: str


FromDriver = Connected | NoRay | Waiting | Started | NotStarted | Exited | Gone

# ------------------------------------------------------------------------------------ actor → keeper


class Keep(msgspec.Struct, frozen=True, tag=True):
    """The first line."""

    job: WorkerJob
    node_ip: str
    group: RayGroup | None = None
    """If its ranks may be on several nodes."""


class EndKept(msgspec.Struct, frozen=True, tag=True):
    grace_s: float


KeeperTold = Keep | EndKept
# The keeper answers with `Started` or `NotStarted`, `Exited`, and, by leaving, with `Gone`.
KeeperSays = Started | NotStarted | Exited
