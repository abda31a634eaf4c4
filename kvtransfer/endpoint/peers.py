"""What an endpoint knows of the ranks at the other end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.imports import Import, Piece
from kvtransfer.layout import CacheLayout, Region
from kvtransfer.links.negotiation import LinkSide, unusable_links
from kvtransfer.messages import Hello, MemoryRegion, SharedAllocation


@dataclass(frozen=True)
class RankIdentity:
    """This process, as peers know it."""

    epoch: str
    host_id: str
    pid: int
    device: str = "cpu"
    """Where the KV cache lies: `cpu`, or the PCI address of the GPU."""
    nccl_version: int = 0
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Links that turned out not to work in this process, and why."""
    allocations: Sequence[SharedAllocation] = ()
    """What other processes map to read a cache on a GPU."""

    def link_side(self, enabled: Sequence[str], passed_over: Mapping[str, str] | None = None) -> LinkSide:
        """What this rank brings to the choice of a link. `passed_over`: links that failed with this one peer."""
        unusable = unusable_links(enabled, self.device)
        unusable |= {link: reason for link, reason in self.unusable.items() if link in enabled}
        unusable |= passed_over or {}
        links = [link for link in enabled if link not in unusable]
        return LinkSide(links, self.host_id, self.pid, self.device, self.nccl_version, unusable)

    def hello(self, settings: EndpointSettings, layout: CacheLayout, exporter: "ExporterPeer") -> Hello:
        """As importer."""
        us = self.link_side(settings.links, exporter.passed_over)
        return Hello(
            self.epoch,
            settings.rank,
            layout.fingerprint(),
            layout.fields(),
            self.host_id,
            list(us.links),
            exporter_epoch=exporter.key.epoch,
            pid=self.pid,
            device=self.device,
            nccl_version=self.nccl_version,
            unusable=dict(us.unusable),
        )


@dataclass(frozen=True)
class ImporterPeer:
    """An importer that was welcomed."""

    epoch: str
    link: str


@dataclass(frozen=True)
class PeerKey:
    """An exporter: a process that was restarted on the same address is another one."""

    address: str
    epoch: str


@dataclass
class ExporterPeer:
    """An exporter. `link` is empty until it is agreed on; `refusal` is set when it never will be."""

    key: PeerKey
    passed_over: dict[str, str]
    """Links that were tried with it and do not work, and why."""
    answer_until_s: float
    """When `Hello` or `Beat` must have been answered; infinite when nothing is asked."""
    next_beat_s: float
    preparing: str = ""
    """The link that was chosen and is being made ready."""
    link: str = ""
    why: str = ""
    refusal: str = ""
    pid: int = 0
    layers: tuple[tuple[Region, ...], ...] = ()
    """Per layer, where this process reads its blocks; only for links that read memory."""
    imports: dict[str, Import] = field(default_factory=dict)  # those that still want something of it
    abandoned: list[Import] = field(default_factory=list)  # given up before the exporter could be told of them
    with_work: dict[str, Import] = field(default_factory=dict)  # those that may have pieces to fetch, in turn
    fetches: dict[int, tuple[Import, Piece, float]] = field(default_factory=dict)  # and when each was sent
    last_blocks_s: float = 0.0

    def regions(self, piece: Piece) -> tuple[Region, ...]:
        layers = self.layers[piece.first_layer : piece.first_layer + piece.num_layers]
        return tuple(region for layer in layers for region in layer)

    def has_block(self, block_id: int) -> bool:
        return block_id >= 0 and (not self.layers or block_id < self.layers[0][0].num_blocks)

    def forget_fetches(self, reader: Import, before_attempt: int | None = None) -> None:
        """Late answers are dropped unread, so nothing is being written for these from now on."""
        for fetch_id, (other, piece, _) in list(self.fetches.items()):
            if other is reader and (before_attempt is None or piece.attempt < before_attempt):
                del self.fetches[fetch_id]
                del reader.in_flight[fetch_id]


def next_piece(
    peers: Iterable[ExporterPeer], piece_id: int, max_bytes: int
) -> tuple[ExporterPeer, Import, Piece] | None:
    """The next piece to copy from one of `peers`; each of its transfers has its turn, whatever its size."""
    for peer in peers:
        while peer.with_work:
            transfer_id, reader = next(iter(peer.with_work.items()))
            del peer.with_work[transfer_id]
            if piece := reader.next_piece(piece_id, max_bytes):
                peer.with_work[transfer_id] = reader  # at the end: others first
                return peer, reader, piece
    return None


def regions_of(regions: list[MemoryRegion], layout: CacheLayout) -> tuple[tuple[Region, ...], ...]:
    """An exporter's regions per layer; its fingerprint is ours, so its runs are too."""
    if len(regions) != sum(len(runs) for runs in layout.block_runs):
        raise BadFrame(f"welcome with {len(regions)} memory regions for {layout.num_layers} layers")
    following = iter(regions)
    return tuple(
        tuple(
            Region(there.base_address, there.block_stride_bytes, run_bytes, there.num_blocks)
            for run_bytes, there in zip(runs, following, strict=False)
        )
        for runs in layout.block_runs
    )
