"""Whether an importer that greets may attach, over which link, and what it is told. Pure."""

from dataclasses import dataclass

from kvtransfer.endpoint.peers import ImporterPeer, RankIdentity, importer_peer
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheMap
from kvtransfer.links.negotiation import READING_LINKS, LinkSide, choose_link
from kvtransfer.messages import Hello, MemoryRegion, Refused, Welcome
from kvtransfer.resharding.pairing import differing_fields
from kvtransfer.resharding.shares import NotShareable


@dataclass(frozen=True)
class Welcomed:
    """The importer as the exporter knows it from now on, and the answer."""

    peer: ImporterPeer
    answer: Welcome


def greet(hello: Hello, settings: EndpointSettings, cache: CacheMap, us: RankIdentity) -> Welcomed | Refused:
    """Compares epochs and layouts, and picks the best link that both sides can use."""
    if hello.exporter_epoch != us.epoch:
        return Refused(us.epoch, f"epoch {hello.exporter_epoch} is over, this is another process", [])
    if hello.fingerprint != cache.layout.fingerprint():
        differing = differing_fields(cache.layout.fields(), hello.layout_fields)
        if differing:
            pairs = [f"{field.name} is {field.exporter} here and {field.importer} there" for field in differing]
            reason = f"the KV layouts differ: {', '.join(pairs)}"
            return Refused(us.epoch, reason, [field.name for field in differing])
    theirs = LinkSide(hello.links, hello.host_id, hello.pid, hello.device, hello.nccl_version, unusable=hello.unusable)
    choice = choose_link(theirs, us.link_side(settings.links))
    if not choice.link:
        return Refused(us.epoch, choice.why, ["links"])
    try:
        peer = importer_peer(hello, choice.link, cache, settings.rank)
    except NotShareable as error:
        return Refused(us.epoch, f"the KV caches cannot be cut alike: {error}", ["form"])
    regions = peer.regions(0, cache.layout.num_layers) if choice.link in READING_LINKS else ()
    memory = [MemoryRegion(r.base_address, r.block_stride_bytes, r.num_blocks) for r in regions]
    allocations = list(us.allocations) if choice.link == "cuda_ipc" else []
    form = cache.layout.form
    answer = Welcome(us.epoch, settings.rank, choice.link, choice.why, us.pid, memory, allocations, form)
    return Welcomed(peer, answer)
