"""What an endpoint knows of the ranks at the other end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheLayout, CacheMap, Region, region_of
from kvtransfer.links.negotiation import READING_LINKS, LinkSide, unusable_links
from kvtransfer.messages import Hello, MemoryRegion, SharedAllocation, Welcome
from kvtransfer.region_runs import LayerRegions, Regions
from kvtransfer.resharding.forms import CacheForm
from kvtransfer.resharding.shares import NotShareable, Share, Units, share
from kvtransfer.transfers.fetch_turns import FetchTurns
from kvtransfer.transfers.imports import Import, Piece


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
            form=layout.form,
        )


@dataclass(frozen=True)
class ImporterPeer:
    """An importer that was welcomed."""

    epoch: str
    link: str
    layers: LayerRegions
    """What of our cache it shares."""
    units_per_block: int
    """Of our blocks, in what it asks for."""

    @property
    def largest_layer_bytes(self) -> int:
        """Of one block, or unit: no smaller fetch is possible."""
        return self.layers.largest_bytes

    def regions(self, first_layer: int, num_layers: int) -> Regions:
        return self.layers.run(first_layer, num_layers)

    def blocks_of(self, units: Iterable[int]) -> list[int]:
        """Our blocks in which these lie."""
        return [unit // self.units_per_block for unit in units]


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
    layers: LayerRegions = field(default_factory=LayerRegions)
    """Where this process reads what the exporter shares with us; only for links that read memory."""
    targets: LayerRegions = field(default_factory=LayerRegions)
    """The same in our cache, on any link."""
    units: Units | None = None
    """How its transfers are counted; None until it is welcomed."""
    rank: int = 0
    tp_size: int = 0
    """Of its worker; 0 where it is not told."""
    num_blocks: int | None = None
    """Of its cache, where it is known."""
    imports: dict[str, Import] = field(default_factory=dict)  # those that still want something of it
    abandoned: list[Import] = field(default_factory=list)  # given up before the exporter could be told of them
    with_work: dict[str, Import] = field(default_factory=dict)  # those that may have pieces to fetch
    fetches: dict[int, tuple[Import, Piece, float]] = field(default_factory=dict)  # and when each was sent
    last_blocks_s: float = 0.0

    def regions(self, piece: Piece) -> Regions:
        return self.layers.run(piece.first_layer, piece.num_layers)

    @property
    def largest_layer_bytes(self) -> int:
        """Of one block, or unit: no smaller fetch is possible."""
        return self.targets.largest_bytes

    def target_regions(self, piece: Piece) -> Regions:
        """Ours, in the same order."""
        return self.targets.run(piece.first_layer, piece.num_layers)

    def has_block(self, block_id: int) -> bool:
        return block_id >= 0 and (self.num_blocks is None or block_id < self.num_blocks)

    def agree(self, welcome: Welcome, cache: CacheMap, rank: int) -> None:
        """Note what we share with it. Raises NotShareable, and BadFrame for regions that do not fit."""
        layout = cache.layout
        common = _share(welcome.form, welcome.rank, layout.form, rank)
        if common is None and welcome.rank != rank:
            raise NotShareable(f"rank {welcome.rank} has other heads than rank {rank}, and they cannot be told apart")
        self.rank, self.tp_size = welcome.rank, welcome.form.tp_size if welcome.form else 0
        self.units = common.units if common else Units(layout.block_size, layout.layer_bytes)
        self.targets = LayerRegions(cache.cut(common.importer) if common else cache.layers)
        is_read = welcome.link in READING_LINKS
        self.layers = LayerRegions(regions_of(welcome.regions, common or layout) if is_read else ())
        self.num_blocks = welcome.regions[0].num_blocks if welcome.regions else None

    def forget_fetches(self, reader: Import, before_attempt: int | None = None) -> None:
        """Late answers are dropped unread, so nothing is being written for these from now on."""
        for fetch_id, (other, piece, _) in list(self.fetches.items()):
            if other is reader and (before_attempt is None or piece.attempt < before_attempt):
                del self.fetches[fetch_id]
                del reader.in_flight[fetch_id]


def next_piece(
    peers: Iterable[ExporterPeer], turns: FetchTurns, piece_id: int, max_bytes: int
) -> tuple[ExporterPeer, Import, Piece] | None:
    """The next piece to copy from one of `peers`; each transfer has its turn, whatever its size."""
    owners = {reader: peer for peer in peers for reader in peer.with_work.values()}
    for reader in turns.in_order(owners):
        peer = owners[reader]
        if piece := reader.next_piece(piece_id, max_bytes):
            reader.last_turn = turns.give()
            return peer, reader, piece
        del peer.with_work[reader.transfer_id]
    return None


def importer_peer(hello: Hello, link: str, cache: CacheMap, our_rank: int) -> ImporterPeer:
    """What an importer gets of our cache. Raises NotShareable."""
    common = _share(cache.layout.form, our_rank, hello.form, hello.rank)
    layers = LayerRegions(cache.cut(common.exporter) if common else cache.layers)
    return ImporterPeer(hello.epoch, link, layers, common.units.exporter_per_block if common else 1)


def _share(
    exporter: CacheForm | None, exporter_rank: int, importer: CacheForm | None, importer_rank: int
) -> Share | None:
    """None where a cache cannot be cut: the two are equal then, and share everything."""
    return share(exporter, exporter_rank, importer, importer_rank) if exporter and importer else None


def regions_of(regions: list[MemoryRegion], common: Share | CacheLayout) -> tuple[tuple[Region, ...], ...]:
    """An exporter's regions per layer: those that it shares, or, if its fingerprint is ours, all runs of its blocks."""
    per_layer = common.exporter if isinstance(common, Share) else common.block_runs
    if len(regions) != sum(len(layer) for layer in per_layer):
        raise BadFrame(f"welcome with {len(regions)} memory regions for {len(per_layer)} layers")
    following = iter(regions)
    if isinstance(common, Share):
        return tuple(
            tuple(
                region_of(runs, there.base_address, there.num_blocks)
                for runs, there in zip(layer, following, strict=False)
            )
            for layer in common.exporter
        )
    return tuple(
        tuple(
            Region(there.base_address, there.block_stride_bytes, run_bytes, there.num_blocks)
            for run_bytes, there in zip(runs, following, strict=False)
        )
        for runs in common.block_runs
    )
