"""How one rank's endpoint behaves. Durations are in seconds."""

from dataclasses import dataclass

from kvtransfer.layout import CacheLayout
from kvtransfer.links.negotiation import LINKS
from kvtransfer.trust.door import is_loopback, is_network
from kvtransfer.verification.block_checks import VERIFY_MODES

MAX_FETCH_BYTES = 64 << 20
"""An exporter serves no larger fetch, whatever the importer asks for."""
MAX_FETCHES_QUEUED = 64
"""Per importer and transfer, at the exporter."""


STAGING_CHUNKS = 4
"""A send through NCCL takes this many chunks, since it costs much more to begin than a ZMQ message."""


@dataclass(frozen=True)
class EndpointSettings:
    rank: int
    """Rank within the engine; an importer talks to the exporters that the proxy names."""
    bind: str
    """ZMQ endpoint of the exporter: `ipc://` and a path of at most 100 characters, to which `-RANK` is appended
    (ZMQ would let a second rank take the first one's path away), or `tcp://127.0.0.1:0`."""
    worker_id: str = ""
    """For the log."""
    report_to: str | None = None
    """ZMQ endpoint of the worker host's ROUTER; None without a host."""
    links: tuple[str, ...] = LINKS
    """Links this rank may use, best first."""
    lease_first_s: float = 30.0
    """From the end of the prefill, for an importer to turn up."""
    beat_s: float = 5.0
    """Between two renewals by an importer."""
    lease_renew_s: float = 20.0
    """What one renewal grants, counted from its arrival."""
    attach_wait_s: float = 5.0
    """How long an attach may wait for its export to be opened."""
    peer_heartbeat_s: float = 1.0
    """Between two ZMTP pings on a connection."""
    peer_lost_after_s: float = 5.0
    """Silence after which a peer counts as lost."""
    stalled_after_s: float = 10.0
    """With fetches outstanding and nothing arriving for this long, a transfer fails."""
    chunk_bytes: int = 5 << 20
    """Payload of one `Blocks` message, exceeded only where one layer of one block is larger."""
    fetch_window: int = 3
    """Fetches outstanding per exporter."""
    prepare_within_s: float = 10.0
    """For mapping an exporter's GPU memory, or for NCCL to connect two ranks; after that another link must do."""
    max_communicators: int = 8
    """NCCL communicators, as exporter and again as importer; each takes 50 to 100 MB of GPU memory and two buffers."""

    key_file: str = ""
    """Of the cluster's key (`trust.key`), which both ends of every tcp connection must hold. Empty: no key, and then
    only a loopback address or ipc may be bound."""
    verify: str = "off"
    """One of `VERIFY_MODES`: which copied blocks are compared with the exporter's before they count. Of an importer;
    exporters answer in any case."""

    def staging_bytes(self, layout: CacheLayout) -> int:
        """Of each of a communicator's two staging buffers: the largest fetch on link `nccl`."""
        return min(MAX_FETCH_BYTES, max(self.chunk_bytes * STAGING_CHUNKS, *layout.layer_bytes))

    def __post_init__(self) -> None:
        unknown = [link for link in self.links if link not in LINKS]
        if unknown or not self.links:
            raise ValueError(f"links is {list(self.links)}: name one or more of {list(LINKS)}, best first.")
        if self.verify not in VERIFY_MODES:
            raise ValueError(f"verify is {self.verify!r}: choose one of {list(VERIFY_MODES)}.")
        if self.bind.startswith("ipc://") and len(self.bind) > len("ipc://") + 100:
            raise ValueError(f"bind is {self.bind!r}: the path of an ipc socket has at most 100 characters.")
        if is_network(self.bind) and not self.key_file and not is_loopback(self.bind):
            raise ValueError(
                f"bind is {self.bind!r} and key_file is empty: anybody who reaches that address could read and disturb "
                "KV blocks. Give the path of a key file that both servers have, or bind to tcp://127.0.0.1:0."
            )
        if not 1 <= self.chunk_bytes <= MAX_FETCH_BYTES:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}: choose 1 to {MAX_FETCH_BYTES}, best about 5 MiB.")
        if self.max_communicators < 1:
            raise ValueError(f"max_communicators is {self.max_communicators}: choose 1 or more, or drop the link nccl.")
        if not 1 <= self.fetch_window <= MAX_FETCHES_QUEUED:
            raise ValueError(f"fetch_window is {self.fetch_window}: choose 1 to {MAX_FETCHES_QUEUED}.")
        for name in (
            "lease_first_s",
            "beat_s",
            "lease_renew_s",
            "peer_heartbeat_s",
            "peer_lost_after_s",
            "prepare_within_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a duration in seconds above 0 is needed.")
        if self.beat_s >= self.lease_renew_s:
            raise ValueError(
                f"beat_s is {self.beat_s} and lease_renew_s {self.lease_renew_s}: a lease would end between two beats. "
                "Make the lease at least twice the beat."
            )
