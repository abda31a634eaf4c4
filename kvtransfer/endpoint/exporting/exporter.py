"""All exports of one rank and the importers that talk to it: messages in, messages out. No I/O, no clock.

The endpoint's thread is the only caller. `importer` is the ZMQ routing id of an importer's connection.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvtransfer.copy_plan import payload_bytes
from kvtransfer.endpoint.exporting.fetch_queue import FetchQueue
from kvtransfer.endpoint.exporting.greeting import greet
from kvtransfer.endpoint.exporting.nccl_exports import NcclExports
from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.peers import ImporterPeer, RankIdentity
from kvtransfer.endpoint.settings import MAX_FETCH_BYTES, MAX_FETCHES_QUEUED, EndpointSettings
from kvtransfer.layout import CacheMap, Region
from kvtransfer.links.nccl_orders import NcclEvent
from kvtransfer.links.negotiation import READING_LINKS
from kvtransfer.messages import (
    Attach,
    Attached,
    Beat,
    BeatAck,
    Check,
    CommBroken,
    CommRequest,
    Failed,
    Fetch,
    FromExporter,
    FromImporter,
    Hello,
    Refused,
    Release,
)
from kvtransfer.transfers.export import ClosedExport, Export
from kvtransfer.transfers.lease import READABLE_STATES, LeaseState
from kvtransfer.verification.check_thread import CheckResult
from kvtransfer.verification.exporter_side import ExportChecks

log = logging.getLogger("twinpool.kvtransfer")

_ENDED_REMEMBERED = 1024
_KIND_OF_OUTCOME = {
    "released": "unknown_transfer",
    "expired": "lease_expired",
    "dropped": "aborted",
    "aborted": "aborted",
}


@dataclass(frozen=True)
class _WaitingAttach:
    """It came before its export was opened."""

    importer: bytes
    message: Attach
    until_s: float
    is_released: bool = False
    """Nor does it want it any more; the export need not wait for another when it opens."""


class Exporter:
    def __init__(self, settings: EndpointSettings, cache: CacheMap, identity: RankIdentity) -> None:
        self._settings = settings
        self._cache = cache
        self._identity = identity
        self._importers: dict[bytes, ImporterPeer] = {}  # those that may attach, by routing id
        self._routing_ids: dict[str, bytes] = {}  # of the same, by their epochs
        self._exports: dict[str, Export] = {}
        self._waiting: dict[tuple[bytes, str], _WaitingAttach] = {}
        self._fetches = FetchQueue()
        self._ended: dict[str, Failed] = {}  # what to answer about the last ones that closed
        self._reasons: dict[str, str] = {}  # why transfers that are still open were called off
        self.outbox: list[tuple[bytes, FromExporter]] = []
        self.closed: list[ClosedExport] = []
        self.started: list[str] = []
        self.welcomed: list[tuple[str, int]] = []  # new importers on this machine: epochs and pids
        self.failures: Counter[str] = Counter()
        self.bytes_out: Counter[str] = Counter()
        self.copy_out_s: dict[str, float] = {}
        self.nccl = NcclExports(settings, cache, self._is_wanted, self._importers)
        self.checks = ExportChecks()

    @property
    def num_open(self) -> int:
        return len(self._exports)

    def leases(self) -> dict[str, int]:
        """Open exports by the state of their lease."""
        counts = Counter(export.lease.state for export in self._exports.values())
        return {state.value: counts[state] for state in LeaseState if state is not LeaseState.CLOSED}

    @property
    def needs_sweep(self) -> bool:
        return bool(self._exports or self._waiting) or self.nccl.pairs.needs_sweep

    @property
    def has_fetches(self) -> bool:
        """Some can be served now; others may wait for their communicator."""
        return self._fetches.has_any(self._can_serve)

    # What the engine says.

    def open(self, now_s: float, transfer_id: str, prompt_hash: bytes, num_prompt_tokens: int) -> None:
        if transfer_id in self._exports:
            log.warning("export_opened_twice transfer=%s", transfer_id)
            return
        lease_until_s = now_s + self._settings.lease_first_s
        self._exports[transfer_id] = Export(transfer_id, prompt_hash, num_prompt_tokens, lease_until_s)
        self._ended.pop(transfer_id, None)
        self.started.append(transfer_id)
        for key in [key for key in self._waiting if key[1] == transfer_id]:
            waiting = self._waiting.pop(key)
            self._attach(now_s, waiting.importer, waiting.message)
            if waiting.is_released:
                self._release(waiting.importer, transfer_id)

    def announce(
        self, now_s: float, transfer_id: str, block_ids: Sequence[int], num_tokens: int, num_layers: int | None = None
    ) -> None:
        if export := self._named(transfer_id, "announced"):
            self._tell(export.lease.importers, export.announce(block_ids, num_tokens, num_layers))

    def restart(self, now_s: float, transfer_id: str) -> None:
        if export := self._named(transfer_id, "restarted"):
            self._tell(export.lease.importers, export.restart())
            self._fetches.forget(transfer_id)

    def finish(
        self, now_s: float, transfer_id: str, block_ids: Sequence[int], num_tokens: int, first_token: int | None
    ) -> None:
        if export := self._named(transfer_id, "finished"):
            lease_until_s = now_s + self._settings.lease_first_s
            self._tell(export.lease.importers, export.finish(block_ids, num_tokens, first_token, lease_until_s))
            self._close_if_over(export)

    def abort(self, now_s: float, transfer_id: str, reason: str) -> None:
        if export := self._named(transfer_id, "aborted"):
            self._fail_importers(export, reason)
            export.lease.abort()
            self._close_if_over(export)

    # What the proxy says, by way of the host.

    def drop(self, now_s: float, transfer_ids: Iterable[str]) -> None:
        for transfer_id in transfer_ids:
            if export := self._exports.get(transfer_id):
                self._fail_importers(export, "the proxy dropped the transfer")
                export.lease.drop()
                self._close_if_over(export)

    def hold(self, now_s: float, transfer_ids: Iterable[str]) -> None:
        for transfer_id in transfer_ids:
            if export := self._exports.get(transfer_id):
                export.lease.renew(now_s + self._settings.lease_renew_s)

    # What importers say.

    def receive(self, now_s: float, importer: bytes, message: FromImporter) -> None:
        """Raises BadFrame for a message that no correct importer sends."""
        if isinstance(message, Hello):
            self._greet(importer, message)
            return
        if importer not in self._importers:
            raise BadFrame(f"{type(message).__name__} from an importer that was not welcomed")
        match message:
            case Attach():
                self._attach(now_s, importer, message)
            case Fetch():
                self._queue(importer, message)
            case Check(transfer_id):
                if self._is_wanted(importer, message):  # otherwise the importer has been, or is being, told
                    self.checks.asked(importer, self._importers[importer], self._exports[transfer_id], message)
            case Release(transfer_id, bytes_moved, copy_s):
                self._count_copied(self._importers[importer].link, bytes_moved, copy_s)
                self._release(importer, transfer_id)
            case Failed(transfer_id, kind, reason):
                log.info("importer_failed transfer=%s kind=%s reason=%r", transfer_id, kind, reason)
                self._release(importer, transfer_id)
            case Beat(transfer_ids):
                self._beat(now_s, importer, transfer_ids)
            case CommRequest() if not self.sends_through_nccl(importer):
                raise BadFrame("a communicator was requested by an importer on another link")
            case CommRequest() | CommBroken():
                self.nccl.receive(now_s, importer, message)
                self._follow_nccl()

    def importer_died(self, epoch: str) -> None:
        """Its process is gone, so it copies nothing any more."""
        if importer := self._routing_ids.pop(epoch, None):
            self._forget_importer(importer)

    def next_fetch(self) -> tuple[bytes, Fetch] | None:
        """The next one to serve; each transfer has its turn, whatever its size."""
        return self._fetches.take(self._can_serve)

    def regions(self, importer: bytes, fetch: Fetch) -> tuple[Region, ...]:
        """Where the bytes of a fetch of this importer lie."""
        known = self._importers.get(importer)
        return known.regions(fetch.first_layer, fetch.num_layers) if known else ()

    # What the check thread and the device's thread say.

    def checked(self, result: CheckResult) -> None:
        self.outbox += self.checks.computed(result, self._is_wanted)

    def nccl_event(self, event: NcclEvent) -> None:
        self.nccl.event(event)
        self._follow_nccl()

    def sends_through_nccl(self, importer: bytes) -> bool:
        known = self._importers.get(importer)
        return known is not None and known.link == "nccl"

    # What time says.

    def sweep(self, now_s: float) -> None:
        self.nccl.pairs.sweep(now_s)
        self._follow_nccl()
        for export in list(self._exports.values()):
            importers = export.lease.importers
            if export.lease.expire(now_s) and export.lease.outcome == "expired":
                self.failures["lease_expired"] += 1
                failed = Failed(export.transfer_id, "lease_expired", "the exporter's lease ran out before the release")
                self._tell(importers, [failed])
            self._close_if_over(export)
        for key in [key for key, waiting in self._waiting.items() if waiting.until_s <= now_s]:
            waiting = self._waiting.pop(key)
            if not waiting.is_released:
                reason = f"no such export was opened within {self._settings.attach_wait_s:g} s"
                self._tell([waiting.importer], [Failed(waiting.message.transfer_id, "unknown_transfer", reason)])

    def abort_all(self, now_s: float, reason: str) -> None:
        for transfer_id in list(self._exports):
            self.abort(now_s, transfer_id, reason)

    def close_all(self) -> None:
        """The process cannot wait any longer; whoever still reads its memory will notice."""
        for export in list(self._exports.values()):
            self._end(export.transfer_id, export.lease.outcome or "aborted")

    def _greet(self, importer: bytes, hello: Hello) -> None:
        greeting = greet(hello, self._settings, self._cache, self._identity)
        if isinstance(greeting, Refused):
            self._tell([importer], [greeting])
            log.warning("importer_refused reason=%r", greeting.reason)
            return
        answer = greeting.answer
        if answer.link != "nccl":
            self.nccl.forget(importer, f"the importer changed to the link {answer.link}")
        previous = self._routing_ids.get(hello.epoch)
        if previous is not None and previous != importer:
            self._forget_importer(previous)  # before it greets again, an importer gives up what it did before
        self._importers[importer] = greeting.peer
        self._routing_ids[hello.epoch] = importer
        self._tell([importer], [answer])
        if previous is None and hello.pid and hello.host_id == self._identity.host_id:
            self.welcomed.append((hello.epoch, hello.pid))
        log.info("importer_welcomed rank=%d epoch=%s link=%s why=%r", hello.rank, hello.epoch, answer.link, answer.why)

    def _attach(self, now_s: float, importer: bytes, attach: Attach) -> None:
        transfer_id = attach.transfer_id
        export = self._exports.get(transfer_id)
        if attach.exporter_epoch != self._identity.epoch:
            reason = f"the transfer belongs to epoch {attach.exporter_epoch}, this is {self._identity.epoch}"
            self._tell([importer], [Failed(transfer_id, "peer_lost", f"{reason}: the exporter restarted")])
        elif export is None and transfer_id in self._ended:
            self._tell([importer], [self._ended[transfer_id]])
        elif export is None:
            until_s = now_s + self._settings.attach_wait_s
            self._waiting[importer, transfer_id] = _WaitingAttach(importer, attach, until_s)
        elif mismatch := export.mismatch(attach):
            self._tell([importer], [Failed(transfer_id, "mismatch", mismatch)])
        elif export.lease.state not in READABLE_STATES:
            reason = self._reasons.get(transfer_id, "the export was called off")
            self._tell([importer], [Failed(transfer_id, "aborted", reason)])
        else:
            reads_memory = self._importers[importer].link in READING_LINKS
            export.lease.attach(importer, reads_memory, attach.importers_expected)
            export.lease.renew(now_s + self._settings.lease_renew_s)
            self._tell([importer], [Attached(transfer_id, export.lease.until_s), *export.so_far()])

    def _queue(self, importer: bytes, fetch: Fetch) -> None:
        if not self._is_wanted(importer, fetch):
            return  # the importer has been, or is being, told
        through_nccl = self.sends_through_nccl(importer)
        if through_nccl and fetch.generation != self.nccl.pairs.generation(importer):
            return  # it will be repeated through the next communicator
        num_layers = self._cache.layout.num_layers
        if fetch.first_layer < 0 or not 0 < fetch.num_layers <= num_layers - fetch.first_layer:
            raise BadFrame(f"fetch of layers {fetch.first_layer}+{fetch.num_layers}; this model has {num_layers}")
        peer = self._importers[importer]
        export = self._exports[fetch.transfer_id]
        if not fetch.block_ids or not export.names_all(peer.blocks_of(fetch.block_ids)):
            raise BadFrame(f"fetch of blocks that transfer {fetch.transfer_id} did not name")
        num_bytes = payload_bytes(len(fetch.block_ids), peer.regions(fetch.first_layer, fetch.num_layers))
        largest = max(MAX_FETCH_BYTES, max(self._cache.layout.layer_bytes))
        if through_nccl:
            largest = self.nccl.pairs.staging_bytes(importer)
        num_waiting = self._fetches.num_waiting(importer, fetch.transfer_id)
        if num_bytes > largest or num_waiting >= MAX_FETCHES_QUEUED:
            raise BadFrame(f"fetch of {num_bytes} bytes with {num_waiting} fetches waiting")
        self._fetches.add(importer, fetch)

    def _beat(self, now_s: float, importer: bytes, transfer_ids: list[str]) -> None:
        until_s = now_s + self._settings.lease_renew_s
        held: list[str] = []
        unknown: list[str] = []
        for transfer_id in transfer_ids:
            export = self._exports.get(transfer_id)
            attached = export is not None and importer in export.lease.importers and export.lease.renew(until_s)
            (held if attached or (importer, transfer_id) in self._waiting else unknown).append(transfer_id)
        self._tell([importer], [BeatAck(until_s, held, unknown)])

    def _release(self, importer: bytes, transfer_id: str) -> None:
        if waiting := self._waiting.get((importer, transfer_id)):
            self._waiting[importer, transfer_id] = replace(waiting, is_released=True)
        if export := self._exports.get(transfer_id):
            self._fetches.forget(transfer_id, importer)
            export.lease.release(importer)
            self._close_if_over(export)

    def _count_copied(self, link: str, bytes_moved: int, copy_s: float) -> None:
        if bytes_moved > 0:
            self.bytes_out[link] += bytes_moved
            self.copy_out_s[link] = self.copy_out_s.get(link, 0.0) + copy_s

    def _forget_importer(self, importer: bytes) -> None:
        self._importers.pop(importer, None)
        self.nccl.forget(importer, "the importer is lost")
        for export in list(self._exports.values()):
            self._fetches.forget(export.transfer_id, importer)
            export.lease.lose(importer)
            self._close_if_over(export)
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting.importer != importer}

    def _fail_importers(self, export: Export, reason: str) -> None:
        self._reasons.setdefault(export.transfer_id, reason)
        self._tell(export.lease.importers, [Failed(export.transfer_id, "aborted", reason)])
        self._fetches.forget(export.transfer_id)

    def _can_serve(self, importer: bytes) -> bool:
        return not (self.sends_through_nccl(importer) and self.nccl.pairs.is_busy(importer))

    def _is_wanted(self, importer: bytes, asked: Fetch | Check) -> bool:
        export = self._exports.get(asked.transfer_id)
        return export is not None and importer in export.lease.importers and not export.is_over(asked)

    def _follow_nccl(self) -> None:
        for importer in self.nccl.take_broken():
            self._fetches.forget_importer(importer)
        self.outbox += self.nccl.take_messages()

    def _named(self, transfer_id: str, verb: str) -> Export | None:
        export = self._exports.get(transfer_id)
        if export is None:
            log.info("export_unknown transfer=%s verb=%s", transfer_id, verb)  # closed already, or never opened
        return export

    def _close_if_over(self, export: Export) -> None:
        if export.lease.state is LeaseState.CLOSED:
            self._end(export.transfer_id, export.lease.outcome)

    def _end(self, transfer_id: str, outcome: str) -> None:
        if self._exports.pop(transfer_id, None) is None:
            return
        self._fetches.forget(transfer_id)
        kind, reason = _KIND_OF_OUTCOME[outcome], self._reasons.pop(transfer_id, "")
        self._ended[transfer_id] = Failed(transfer_id, kind, f"the export was {outcome}: {reason}".rstrip(": "))
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self.closed.append(ClosedExport(transfer_id, outcome))
        log.info("export_closed transfer=%s outcome=%s", transfer_id, outcome)

    def _tell(self, importers: Iterable[bytes], messages: Iterable[FromExporter]) -> None:
        self.outbox.extend((importer, message) for message in messages for importer in importers)
