"""Ways to copy blocks, each with a side in the exporter's process and one in the importer's.

An arm that cannot run here raises `ArmUnusable` when it is made, with the reason as a sentence.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.links.arms.block_cache import BlockCache
from lab.links.messages import Queued, Transfer


class ArmUnusable(RuntimeError):
    """This machine cannot run the arm; the text says why."""


class ArmFailed(RuntimeError):
    """The arm began and did not do its work; the text says what happened."""


@dataclass(frozen=True)
class Site:
    """Where a side of an arm lives."""

    cache: BlockCache
    directory: Path
    """For ipc sockets."""
    device: int | None
    """The GPU of `cache`."""


Offers = dict[str, str]
"""What an exporter's side tells the importer's."""


class ExporterSide:
    """What has to be done in the exporter's process; for most arms nothing."""

    offers: Offers = {}

    def offer(self, transfers: Sequence[Transfer]) -> None:
        """Have these ready; the cache is filled."""

    def withdraw(self) -> None:
        """Those that were not taken are not wanted."""

    def close(self) -> None:
        """Nothing is offered any more."""


class ImporterSide:
    def effective(self, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        """What `move` really copies: a contiguous copy cannot scatter blocks."""
        return transfers

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        """Copies all of them at once; returns the seconds that took. Raises ArmFailed."""
        raise NotImplementedError

    def queue(self, large: Transfer | None, small: Sequence[Transfer], pause_s: float, timeout_s: float) -> Queued:
        """See the message `Queue`. Raises ArmFailed."""
        raise ArmFailed("only links are measured behind a large transfer")

    def close(self) -> None:
        """Nothing is copied any more."""


@dataclass(frozen=True)
class ArmKind:
    name: str
    title: str
    """As it is shown."""
    limit: str
    """The arm that this one cannot be faster than; empty for memcpy."""
    exporter: str
    """`module:class`, made with a `Site`; loaded in the arm's own process."""
    importer: str
    """`module:class`, made with a `Site` and the exporter's `Offers`."""
    is_concurrent: bool = True
    """Measured with several transfers at once, too."""
    is_link: bool = False
    is_rival: bool = False


def _bare(name: str, title: str, limit: str, exporter: str, importer: str) -> ArmKind:
    sides = "lab.links.arms.bare"
    return ArmKind(name, title, limit, f"{sides}:{exporter}", f"{sides}:{importer}", is_concurrent=False)


def _link(name: str, limit: str) -> ArmKind:
    sides = "lab.links.arms.twinpool_link"
    return ArmKind(name, name, limit, f"{sides}:LinkExporter", f"{sides}:LinkImporter", is_link=True)


def _rival(name: str, title: str, limit: str, module: str) -> ArmKind:
    return ArmKind(
        name, title, limit, f"lab.links.arms.{module}:Exporter", f"lab.links.arms.{module}:Importer", is_rival=True
    )


ARMS = {
    kind.name: kind
    for kind in (
        _bare("memcpy", "memcpy", "", "NothingToOffer", "Memcpy"),
        _bare("readv", "process_vm_readv", "memcpy", "Readable", "ReadLoop"),
        _bare("tcp", "TCP stream", "memcpy", "StreamSender", "StreamReceiver"),
        _link("host", "readv"),
        _link("zmq", "tcp"),
        _rival("nixl", "NIXL (UCX)", "readv", "nixl_ucx"),
        _rival("mooncake", "Mooncake (TCP)", "tcp", "mooncake_tcp"),
        _bare("cudaMemcpy", "cudaMemcpy", "", "NothingToOffer", "CudaMemcpy"),
        _link("cuda_ipc", "cudaMemcpy"),
        _link("nccl", "cudaMemcpy"),
    )
}


def load(side: str) -> Callable[..., object]:
    """The class that `ArmKind.exporter` or `.importer` names."""
    module, _, name = side.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), name)
    return found
