"""Which pairs of ranks have a communicator, and whose turn it is: one half for each side. Pure.

Both halves keep at most `max_pairs`, since a communicator costs 50 to 100 MB of GPU memory and two staging buffers;
the one that was idle longest makes room. `endpoint/exporting` and `endpoint/importing` own them.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kvtransfer.layout import Region
from kvtransfer.links.nccl_orders import (
    Abort,
    Broken,
    Build,
    Built,
    Gather,
    Gathered,
    IdMade,
    NcclOrder,
    PairId,
    Receive,
    Received,
    Send,
    Sent,
    Skip,
)
from kvtransfer.messages import CommBroken, CommOffer, CommRequest, Fetch, Sending

STAGING_BUFFERS = 2
"""Per communicator and side."""
MAX_TRIES = 3
"""Communicators in a row that carried nothing before the pair gives NCCL up."""

Peer = TypeVar("Peer", bound=Hashable)


class PairState(Enum):
    REQUESTED = "requested"
    BUILDING = "building"
    READY = "ready"


@dataclass
class _Pair:
    generation: int
    state: PairState
    until_s: float
    """When it must be ready."""
    staging_bytes: int = 0
    """The most that one fetch may take."""
    next_sequence: int = 0
    at_work: set[int] = field(default_factory=set)  # fetch ids that use a staging buffer
    last_used_s: float = 0.0


class _Half(Generic[Peer]):
    def __init__(self, max_pairs: int, staging_bytes: int, build_within_s: float, is_exporter: bool) -> None:
        self.orders: list[NcclOrder] = []
        self._max_pairs = max_pairs
        self._staging_bytes = staging_bytes
        self._build_within_s = build_within_s
        self._is_exporter = is_exporter
        self._pairs: dict[Peer, _Pair] = {}

    @property
    def needs_sweep(self) -> bool:
        return any(pair.state is not PairState.READY for pair in self._pairs.values())

    def is_ready(self, peer: Peer) -> bool:
        pair = self._pairs.get(peer)
        return pair is not None and pair.state is PairState.READY

    def generation(self, peer: Peer) -> int:
        """0 without a communicator."""
        return self._pairs[peer].generation if peer in self._pairs else 0

    def staging_bytes(self, peer: Peer) -> int:
        """The most that one fetch may take; 0 without a communicator."""
        return self._pairs[peer].staging_bytes if peer in self._pairs else 0

    def forget(self, peer: Peer, reason: str) -> None:
        """The peer is lost."""
        if pair := self._pairs.pop(peer, None):
            self._abort(peer, pair, reason)

    def _id(self, peer: Peer, pair: _Pair) -> PairId:
        return PairId(peer, pair.generation, self._is_exporter)

    def _abort(self, peer: Peer, pair: _Pair, reason: str) -> None:
        if pair.state is not PairState.REQUESTED:
            self.orders.append(Abort(self._id(peer, pair), reason))

    def _current(self, peer: Peer, generation: int) -> _Pair | None:
        pair = self._pairs.get(peer)
        return pair if pair is not None and pair.generation == generation else None

    def _idle_longest(self) -> Peer | None:
        idle = [peer for peer, pair in self._pairs.items() if pair.state is PairState.READY and not pair.at_work]
        return min(idle, key=lambda peer: self._pairs[peer].last_used_s, default=None)


_EVICTED = "another pair needed its place"


class SendingPairs(_Half[bytes]):
    """The exporter's half; peers are importers, by routing id."""

    def __init__(self, max_pairs: int, staging_bytes: int, build_within_s: float) -> None:
        super().__init__(max_pairs, staging_bytes, build_within_s, is_exporter=True)
        self.outbox: list[tuple[bytes, CommOffer | CommBroken | Sending]] = []
        self.broken: list[bytes] = []
        """Importers whose fetches are void: they will be repeated."""

    def is_busy(self, importer: bytes) -> bool:
        """Nothing can be gathered for it now."""
        pair = self._pairs.get(importer)
        return pair is None or pair.state is not PairState.READY or len(pair.at_work) >= STAGING_BUFFERS

    def requested(self, now_s: float, importer: bytes, request: CommRequest) -> None:
        if previous := self._pairs.pop(importer, None):
            self._abort(importer, previous, "the importer asked for another communicator")
            self.broken.append(importer)
        if len(self._pairs) >= self._max_pairs:
            evicted = self._idle_longest()
            if evicted is None:
                reason = f"all {self._max_pairs} communicators of the exporter are in use"
                self.outbox.append((importer, CommBroken(request.generation, reason, is_failure=True)))
                return
            self._drop(evicted, _EVICTED, is_failure=False)
        pair = _Pair(request.generation, PairState.BUILDING, now_s + self._build_within_s, last_used_s=now_s)
        pair.staging_bytes = min(self._staging_bytes, request.staging_bytes)
        self._pairs[importer] = pair
        self.orders.append(Build(self._id(importer, pair)))

    def dropped(self, importer: bytes, broken: CommBroken) -> None:
        """The importer dropped it."""
        if (pair := self._current(importer, broken.generation)) is not None:
            del self._pairs[importer]
            self._abort(importer, pair, f"the importer dropped it: {broken.reason}")
            self.broken.append(importer)

    def id_made(self, event: IdMade) -> None:
        importer: bytes = event.pair.peer
        if pair := self._current(importer, event.pair.generation):
            self.outbox.append((importer, CommOffer(pair.generation, pair.staging_bytes, event.unique_id)))

    def built(self, event: Built) -> None:
        importer: bytes = event.pair.peer
        if pair := self._current(importer, event.pair.generation):
            pair.state = PairState.READY

    def broke(self, event: Broken) -> None:
        importer: bytes = event.pair.peer
        if self._current(importer, event.pair.generation):
            self._drop(importer, event.reason, is_failure=True)

    def gather(self, now_s: float, importer: bytes, fetch: Fetch, regions: tuple[Region, ...]) -> None:
        """To be called only while the pair is not busy."""
        pair = self._pairs[importer]
        pair.at_work.add(fetch.fetch_id)
        pair.last_used_s = now_s
        self.orders.append(Gather(self._id(importer, pair), fetch.fetch_id, tuple(fetch.block_ids), regions))

    def gathered(self, event: Gathered, num_bytes: int, may_send: bool) -> None:
        """`may_send`: the blocks were still what the fetch asked for when they had been gathered."""
        importer: bytes = event.pair.peer
        pair = self._current(importer, event.pair.generation)
        if pair is None:
            return
        if not may_send:
            pair.at_work.discard(event.fetch_id)
            self.orders.append(Skip(event.pair, event.fetch_id))
            return
        self.outbox.append((importer, Sending(pair.generation, pair.next_sequence, event.fetch_id, num_bytes)))
        pair.next_sequence += 1
        self.orders.append(Send(event.pair, event.fetch_id))

    def sent(self, event: Sent) -> None:
        importer: bytes = event.pair.peer
        if pair := self._current(importer, event.pair.generation):
            pair.at_work.discard(event.fetch_id)

    def sweep(self, now_s: float) -> None:
        for importer, pair in list(self._pairs.items()):
            if pair.state is not PairState.READY and pair.until_s <= now_s:
                reason = f"the communicator was not ready within {self._build_within_s:g} s"
                self._drop(importer, reason, is_failure=True)

    def _drop(self, importer: bytes, reason: str, is_failure: bool) -> None:
        pair = self._pairs.pop(importer)
        self._abort(importer, pair, reason)
        self.outbox.append((importer, CommBroken(pair.generation, reason, is_failure)))
        self.broken.append(importer)


class ReceivingPairs(_Half[Peer]):
    """The importer's half; peers are exporters, by whatever the importer names them."""

    def __init__(self, max_pairs: int, staging_bytes: int, build_within_s: float) -> None:
        super().__init__(max_pairs, staging_bytes, build_within_s, is_exporter=False)
        self.outbox: list[tuple[Peer, CommRequest | CommBroken]] = []
        self.ready: list[Peer] = []
        """Pairs that have just got a communicator."""
        self.given_up: list[tuple[Peer, str]] = []
        """Pairs for which another link must do, and why."""
        self._last_generation = 0
        self._failures: dict[Peer, int] = {}

    def want(self, now_s: float, exporter: Peer) -> None:
        """See to it that there is, or will be, a communicator."""
        if exporter in self._pairs:
            return
        if len(self._pairs) >= self._max_pairs:
            evicted = self._idle_longest()
            if evicted is None:
                return  # one of them will be idle, or broken, soon
            self._drop(now_s, evicted, _EVICTED, is_failure=False)
        self._last_generation += 1
        until_s = now_s + self._build_within_s
        self._pairs[exporter] = _Pair(self._last_generation, PairState.REQUESTED, until_s, last_used_s=now_s)
        self.outbox.append((exporter, CommRequest(self._last_generation, self._staging_bytes)))

    def forget(self, peer: Peer, reason: str) -> None:
        super().forget(peer, reason)
        self._failures.pop(peer, None)
        self.outbox = [(exporter, message) for exporter, message in self.outbox if exporter != peer]

    def offered(self, exporter: Peer, offer: CommOffer) -> None:
        pair = self._current(exporter, offer.generation)
        if pair is not None and pair.state is PairState.REQUESTED:
            pair.state = PairState.BUILDING
            pair.staging_bytes = min(self._staging_bytes, offer.staging_bytes)
            self.orders.append(Build(self._id(exporter, pair), offer.unique_id))

    def dropped(self, now_s: float, exporter: Peer, broken: CommBroken) -> None:
        """The exporter dropped it."""
        if (pair := self._current(exporter, broken.generation)) is not None:
            del self._pairs[exporter]
            self._abort(exporter, pair, f"the exporter dropped it: {broken.reason}")
            if broken.is_failure:
                self._failed(now_s, exporter, broken.reason)

    def built(self, exporter: Peer, event: Built) -> None:
        if (pair := self._current(exporter, event.pair.generation)) is not None:
            pair.state = PairState.READY
            self.ready.append(exporter)

    def broke(self, now_s: float, exporter: Peer, event: Broken) -> None:
        if self._current(exporter, event.pair.generation):
            self._drop(now_s, exporter, event.reason, is_failure=True)

    def sending(self, now_s: float, exporter: Peer, sending: Sending, expected_bytes: int | None) -> PairId | None:
        """The communicator to receive from, or None when that is over. Breaks it when this is not its next send.

        `expected_bytes`: what the fetch asked for; None when it is not wanted any more, and is received nevertheless.
        """
        pair = self._current(exporter, sending.generation)
        if pair is None or pair.state is PairState.REQUESTED:
            return None
        if sending.sequence != pair.next_sequence:
            reason = f"send {sending.sequence} was announced where {pair.next_sequence} had its turn"
        elif expected_bytes is not None and sending.num_bytes != expected_bytes:
            reason = f"{sending.num_bytes} bytes were announced for a fetch of {expected_bytes}"
        elif not 0 < sending.num_bytes <= pair.staging_bytes:
            reason = f"{sending.num_bytes} bytes were announced for a staging buffer of {pair.staging_bytes}"
        else:
            pair.next_sequence += 1
            pair.at_work.add(sending.fetch_id)
            pair.last_used_s = now_s
            return self._id(exporter, pair)
        self._drop(now_s, exporter, reason, is_failure=True)
        return None

    def receive(
        self, pair: PairId, sending: Sending, block_ids: tuple[int, ...] = (), regions: tuple[Region, ...] = ()
    ) -> None:
        """Post the receive that belongs to it."""
        self.orders.append(Receive(pair, sending.fetch_id, sending.num_bytes, block_ids, regions))

    def received(self, exporter: Peer, event: Received) -> None:
        if (pair := self._current(exporter, event.pair.generation)) is not None:
            pair.at_work.discard(event.fetch_id)
            if not event.reason:
                self._failures.pop(exporter, None)

    def sweep(self, now_s: float) -> None:
        for exporter, pair in list(self._pairs.items()):
            if pair.state is not PairState.READY and pair.until_s <= now_s:
                reason = f"the communicator was not ready within {self._build_within_s:g} s"
                self._drop(now_s, exporter, reason, is_failure=True)

    def _drop(self, now_s: float, exporter: Peer, reason: str, is_failure: bool) -> None:
        pair = self._pairs.pop(exporter)
        self._abort(exporter, pair, reason)
        self.outbox.append((exporter, CommBroken(pair.generation, reason, is_failure)))
        if is_failure:
            self._failed(now_s, exporter, reason)

    def _failed(self, now_s: float, exporter: Peer, reason: str) -> None:
        """Try again at once, but not for ever."""
        self._failures[exporter] = self._failures.get(exporter, 0) + 1
        if self._failures[exporter] < MAX_TRIES:
            self.want(now_s, exporter)
        else:
            del self._failures[exporter]
            self.given_up.append((exporter, reason))
