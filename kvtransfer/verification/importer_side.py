"""An importer's part in verifying: once an import has all blocks, their checksums there and here are compared.

Each import has one comparison under way at a time, so that many share the check threads of both sides in turn. No I/O,
no clock.
"""

import logging
from dataclasses import dataclass

from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.peers import ExporterPeer, PeerKey
from kvtransfer.messages import MAX_CHECK_BLOCKS, Check, Checksums
from kvtransfer.transfers.imports import Import
from kvtransfer.verification.block_checks import Comparison
from kvtransfer.verification.check_thread import CheckJob, CheckResult

log = logging.getLogger("twinpool.kvtransfer")

_CHECK_BYTES = 32 << 20
"""Of one comparison: about 10 ms, after which it is another transfer's turn."""


@dataclass
class _UnderWay:
    reader: Import
    comparison: Comparison
    key: PeerKey
    asked_s: float
    theirs: list[int] | None = None
    ours: list[int] | None = None


class ImportChecks:
    def __init__(self) -> None:
        self.jobs: list[CheckJob] = []
        """For the check thread."""
        self._wanted: dict[Import, ExporterPeer] = {}
        self._under_way: dict[int, _UnderWay] = {}  # by check id
        self._last_id = 0

    def follow(self, reader: Import, peer: ExporterPeer | None) -> None:
        """Something has happened to this import: see whether it is to be verified next, or no more."""
        if peer is not None and reader.wants_check:
            self._wanted[reader] = peer
        elif reader.is_over or peer is None:
            self._wanted.pop(reader, None)
            for check_id in [check_id for check_id, check in self._under_way.items() if check.reader is reader]:
                del self._under_way[check_id]  # answers that still come are dropped unread

    def pump(self, now_s: float) -> list[tuple[PeerKey, Check]]:
        """Begin what is to be compared next."""
        messages = []
        for reader, peer in self._wanted.items():
            comparison = reader.next_check(_CHECK_BYTES, MAX_CHECK_BLOCKS)
            self._last_id += 1
            self._under_way[self._last_id] = _UnderWay(reader, comparison, peer.key, now_s)
            self.jobs.append(CheckJob(None, self._last_id, comparison.target_ids, peer.targets))
            message = Check(reader.transfer_id, reader.attempt, self._last_id, list(comparison.source_ids))
            messages.append((peer.key, message))
        self._wanted.clear()
        return messages

    def answered(self, now_s: float, key: PeerKey, message: Checksums) -> Import | None:
        """What the exporter has. Returns the import if that settled it, or some of it. Raises BadFrame."""
        check = self._under_way.get(message.check_id)
        if check is None or check.key != key:
            return None
        if check.theirs is not None or len(message.values) != len(check.comparison.indexes):
            raise BadFrame(f"{len(message.values)} checksums for {len(check.comparison.indexes)} blocks, or twice")
        check.theirs = message.values
        return self._compare(now_s, message.check_id, check)

    def computed(self, now_s: float, result: CheckResult) -> Import | None:
        """What we have. Returns the import if that settled it, or some of it."""
        check = self._under_way.get(result.job.check_id)
        if check is None:
            return None
        if result.reason:
            check.reader.fail("transport", f"no checksums: {result.reason}")
            return check.reader
        check.ours = result.values
        return self._compare(now_s, result.job.check_id, check)

    def stalled(self, now_s: float, after_s: float) -> list[Import]:
        """Those whose exporter has not answered for so long."""
        return [
            check.reader
            for check in self._under_way.values()
            if check.theirs is None and check.asked_s + after_s <= now_s
        ]

    def _compare(self, now_s: float, check_id: int, check: _UnderWay) -> Import | None:
        if check.theirs is None or check.ours is None:
            return None
        del self._under_way[check_id]
        reader, comparison = check.reader, check.comparison
        blocks = zip(comparison.source_ids, comparison.target_ids, check.theirs, check.ours, strict=True)
        for source_id, target_id, theirs, ours in blocks:
            if theirs != ours:
                log.warning(
                    "checksum_differs transfer=%s address=%s link=%s exporter_block=%d importer_block=%d "
                    "exporter_checksum=%08x importer_checksum=%08x",
                    reader.transfer_id, check.key.address, reader.link, source_id, target_id, theirs, ours,
                )  # fmt: skip
        reader.compared(comparison, check.theirs, check.ours, now_s)
        return reader
