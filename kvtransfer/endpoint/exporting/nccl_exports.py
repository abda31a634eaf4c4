"""An exporter's part in the link `nccl`: fetches become gathers, gathers become sends. No I/O, no clock."""

from collections.abc import Callable, Mapping

from kvtransfer.copy_plan import payload_bytes
from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.peers import ImporterPeer
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheMap
from kvtransfer.links.nccl_orders import Broken, Built, Gathered, IdMade, NcclEvent, NcclOrder, Sent
from kvtransfer.links.nccl_pairs import SendingPairs
from kvtransfer.messages import CommBroken, CommOffer, CommRequest, Fetch, Sending


class NcclExports:
    def __init__(
        self,
        settings: EndpointSettings,
        cache: CacheMap,
        is_wanted: Callable[[bytes, Fetch], bool],
        importers: Mapping[bytes, ImporterPeer],
    ) -> None:
        """`is_wanted`: sending what is void would do no harm, but takes its time. `importers`: those welcomed."""
        self.pairs = SendingPairs(
            settings.max_communicators, settings.staging_bytes(cache.layout), settings.prepare_within_s
        )
        self._importers = importers
        self._is_wanted = is_wanted
        self._gathering: dict[tuple[bytes, int, int], tuple[Fetch, int]] = {}
        """Fetches and their sizes in bytes, by importer, generation and fetch id."""

    @property
    def orders(self) -> list[NcclOrder]:
        """For the device's thread."""
        return self.pairs.orders

    def receive(self, now_s: float, importer: bytes, message: CommRequest | CommBroken) -> None:
        """Raises BadFrame for a request that no correct importer makes."""
        if isinstance(message, CommBroken):
            self.pairs.dropped(importer, message)
        elif message.staging_bytes < self._importers[importer].largest_layer_bytes:
            raise BadFrame(f"a request for a communicator with buffers of {message.staging_bytes} bytes")
        else:
            self.pairs.requested(now_s, importer, message)

    def gather(self, now_s: float, importer: bytes, fetch: Fetch) -> None:
        """To be called only while the pair is not busy."""
        regions = self._importers[importer].regions(fetch.first_layer, fetch.num_layers)
        num_bytes = payload_bytes(len(fetch.block_ids), regions)
        self._gathering[importer, fetch.generation, fetch.fetch_id] = (fetch, num_bytes)
        self.pairs.gather(now_s, importer, fetch, regions)

    def event(self, event: NcclEvent) -> None:
        match event:
            case IdMade():
                self.pairs.id_made(event)
            case Built():
                self.pairs.built(event)
            case Broken():
                self.pairs.broke(event)
            case Gathered(pair, fetch_id):
                if gathered := self._gathering.pop((pair.peer, pair.generation, fetch_id), None):
                    fetch, num_bytes = gathered
                    self.pairs.gathered(event, num_bytes, self._is_wanted(pair.peer, fetch))
            case Sent():
                self.pairs.sent(event)

    def forget(self, importer: bytes, reason: str) -> None:
        self.pairs.forget(importer, reason)
        self._drop_gathers(importer)

    def take_broken(self) -> list[bytes]:
        """Importers whose fetches are void, since their communicator is gone; they repeat them through the next."""
        broken, self.pairs.broken = self.pairs.broken, []
        for importer in broken:
            self._drop_gathers(importer)
        return broken

    def take_messages(self) -> list[tuple[bytes, CommOffer | CommBroken | Sending]]:
        messages, self.pairs.outbox = self.pairs.outbox, []
        return messages

    def _drop_gathers(self, importer: bytes) -> None:
        self._gathering = {key: gathered for key, gathered in self._gathering.items() if key[0] != importer}
