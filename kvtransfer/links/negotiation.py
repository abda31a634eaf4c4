"""Which link a pair of ranks uses, and why. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LINKS = ("cuda_ipc", "nccl", "host", "zmq")
"""Every link, best first."""
GPU_LINKS = frozenset({"cuda_ipc", "nccl"})
READING_LINKS = frozenset({"cuda_ipc", "host"})
"""The importer reads the exporter's memory by itself; on the others the exporter sends."""


@dataclass(frozen=True)
class LinkSide:
    """What one rank brings to the choice."""

    links: Sequence[str]
    """Enabled and usable, best first."""
    host_id: str
    """See `host_memory.host_id`: the machine and the pid namespace."""
    pid: int
    device: str = "cpu"
    """Where its KV cache lies: `cpu`, or the PCI address of the GPU."""
    nccl_version: int = 0
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Links enabled but not usable, and why."""


@dataclass(frozen=True)
class LinkChoice:
    link: str
    """Empty when the two have no usable link in common."""
    why: str
    """For the log, `twinpool status` and refusals: of the chosen link, then of each better one passed over."""


def unusable_links(enabled: Sequence[str], device: str) -> dict[str, str]:
    """Those of `enabled` that a cache on `device` can never use, and why."""
    if device == "cpu":
        return {link: "its KV cache is in CPU memory" for link in enabled if link in GPU_LINKS}
    return {link: "its KV cache is in GPU memory" for link in enabled if link == "host"}


def choose_link(importer: LinkSide, exporter: LinkSide) -> LinkChoice:
    """The importer's best link that the exporter has too and that the place of the two allows."""
    passed_over = [f"{link}: {reason} (importer)" for link, reason in importer.unusable.items()]
    for link in importer.links:
        if link in exporter.unusable:
            reason = f"{exporter.unusable[link]} (exporter)"
        elif link not in exporter.links:
            reason = "not enabled at the exporter"
        elif not (reason := _why_apart(link, importer, exporter)):
            return LinkChoice(link, "; ".join([_ADVANTAGES[link], *passed_over]))
        passed_over.append(f"{link}: {reason}")
    words = "; ".join(passed_over) or "the importer has none left"
    return LinkChoice("", f"no link in common: {words}. Enable `zmq` on both sides; it works anywhere.")


_ADVANTAGES = {
    "cuda_ipc": "both ranks are on one machine, with CUDA IPC",
    "nccl": "both ranks have a GPU and NCCL",
    "host": "both ranks are on one machine",
    "zmq": "the best link that both ranks can use",
}


def _why_apart(link: str, importer: LinkSide, exporter: LinkSide) -> str:
    """Why these two cannot use a link that each could use with others; empty when they can."""
    same_host = importer.host_id == exporter.host_id
    if link in GPU_LINKS and "cpu" in (importer.device, exporter.device):
        return "one of the KV caches is in CPU memory"
    if link in READING_LINKS and not same_host:
        return "needs both ranks on one machine and in one pid namespace"
    if link == "cuda_ipc" and importer.pid == exporter.pid:
        return "both ranks are one process, which cannot open its own IPC handles"
    if link == "nccl":
        here, there = (side.host_id.partition("/")[0] for side in (importer, exporter))
        if here == there and importer.device == exporter.device:
            return "both ranks use the same GPU, which NCCL does not allow"
        if importer.nccl_version != exporter.nccl_version:
            return f"NCCL is {importer.nccl_version} at the importer and {exporter.nccl_version} at the exporter"
    return ""
