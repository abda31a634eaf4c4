"""The transfers of one simulated worker: brings together its engine, the workers at the other ends, and the proxy."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from cluster import messages as wire
from cluster.config import SimulationConfig, TransferConfig
from cluster.simulated.engine.cost import CostModel
from cluster.simulated.engine.events import ExportStarted, ImportCancelled, ImportOpened, ImportPlaced
from cluster.simulated.engine.paged_engine import SimulatedEngine
from cluster.simulated.transfers.exports import Exports
from cluster.simulated.transfers.imports import LINK, ClosedImport, Imports
from cluster.simulated.transfers.messages import Failed, Held, PeerMessage, Release, Wanted
from cluster.simulated.transfers.peer_exchange import PeerExchange

FromDesk = wire.PrefillStarted | wire.HandoverClosed


class TransferDesk:
    """Used on the worker's event loop.

    `tell` sends a message to the proxy, `settled` is called when a transfer has ended: the engine may have work again.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        cost: CostModel,
        peers: PeerExchange,
        epoch: str,
        simulation: SimulationConfig,
        transfer: TransferConfig,
        tell: Callable[[FromDesk], None],
        settled: Callable[[], None],
    ) -> None:
        self.exports = Exports(transfer.lease_first_s, transfer.lease_renew_s)
        self.imports = Imports(
            peers.address,
            epoch,
            simulation.kv_bytes_per_token,
            simulation.block_size,
            transfer.peer_lost_after_s,
            cost.transfer_s,
        )
        self._engine = engine
        self._peers = peers
        self._heartbeat_s = transfer.peer_heartbeat_s
        self._tell = tell
        self._settled = settled
        self._moved = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Exports and imports."""
        return sum(self.exports.leases.values()) + len(self.imports)

    def note_engine_events(self) -> None:
        """Tells transfers what the engine did, and the proxy what it wants to know of that."""
        events, self._engine.events = self._engine.events, []
        if not events:
            return
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, ImportOpened | ImportPlaced | ImportCancelled):
                self._peers.send(self.imports.engine_says(event, now_s))
            else:
                self._peers.send(self.exports.engine_says(event, now_s))
            if isinstance(event, ExportStarted):
                self._tell(wire.PrefillStarted(event.transfer_id))
        self._settle(now_s)

    def on_peer(self, message: PeerMessage) -> None:
        """Another worker says something."""
        now_s = time.monotonic()
        match message:
            case Wanted():
                self._peers.send(self.exports.on_wanted(message, now_s))
                return
            case Held():
                self.imports.on_held(message, now_s)
            case Failed(transfer_id=transfer_id, kind=kind):
                self.imports.on_failed(transfer_id, kind)
            case Release():
                self.exports.on_release(message)
        self._settle(now_s)

    def on_first_token(self, transfer_id: str, token: int) -> None:
        """The proxy knows the token that the exporter sampled."""
        self.imports.on_first_token(transfer_id, token)
        self._settle(time.monotonic())

    def hold(self, transfer_ids: list[str]) -> None:
        """The proxy still means to hand these over."""
        for transfer_id in transfer_ids:
            self.exports.hold(transfer_id, time.monotonic())

    def drop(self, transfer_ids: list[str]) -> None:
        """Nobody will fetch these."""
        for transfer_id in transfer_ids:
            self._peers.send(self.exports.drop(transfer_id))
        self._settle(time.monotonic())

    def drop_all(self) -> None:
        """Whoever wanted them is gone."""
        self._peers.send(self.exports.drop_all())
        self._settle(time.monotonic())

    async def watch_arrivals(self) -> None:
        """Wakes up when the last bytes of a transfer are here."""
        while True:
            arrival_s = self.imports.next_arrival_s()
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if arrival_s is None else max(0.0, arrival_s - time.monotonic())):
                    await self._moved.wait()
            if arrival_s is not None and arrival_s <= time.monotonic():
                self._settle(time.monotonic())

    async def renew_leases(self) -> None:
        """Keeps leases alive on both sides, and notices who is gone."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            now_s = time.monotonic()
            self._peers.send(self.imports.ask_again(now_s))
            self._peers.send(self.exports.expire(now_s))
            self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Acts on transfers that have ended."""
        self._peers.send(self.imports.close_what_ended(now_s))
        closed, self.imports.closed = self.imports.closed, []
        for end in closed:
            if end.outcome != "cancelled":
                self._engine.close_import(end.transfer_id, end.num_valid_tokens, end.first_token)
            self._tell(_report(end))
        ended, self.exports.ended = self.exports.ended, []
        for transfer_id in ended:
            self._engine.end_lease(transfer_id)
        if closed or ended:
            self._settled()
        self._moved.set()


def _report(end: ClosedImport) -> wire.HandoverClosed:
    return wire.HandoverClosed(
        transfer_id=end.transfer_id,
        outcome=end.outcome,
        failure_kind=end.failure_kind,
        link=LINK,
        bytes_moved=end.bytes_moved,
        num_tokens=end.num_tokens,
        attached_to_done_s=end.attached_to_done_s,
        done_to_loaded_s=end.done_to_loaded_s,
        copy_s=end.copy_s,
        bytes_left_at_done=end.bytes_left_at_done,
    )
