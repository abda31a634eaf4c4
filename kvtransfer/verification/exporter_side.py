"""An exporter's part in verifying: importers ask for checksums, jobs go out, answers come back. No I/O, no clock."""

from collections.abc import Callable

from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.endpoint.peers import ImporterPeer
from kvtransfer.messages import MAX_CHECK_BLOCKS, Check, Checksums, Failed
from kvtransfer.transfers.export import Export
from kvtransfer.verification.check_thread import CheckJob, CheckResult


class ExportChecks:
    def __init__(self) -> None:
        self.jobs: list[CheckJob] = []
        """For the check thread."""
        self._under_way: dict[tuple[bytes, int], Check] = {}  # by importer and check id

    def asked(self, importer: bytes, peer: ImporterPeer, export: Export, check: Check) -> None:
        """To be called while the export is not over. Raises BadFrame for a message that no correct importer sends."""
        if not export.is_done:
            raise BadFrame(f"a check of transfer {check.transfer_id}, which is still being computed")
        names_all = export.names_all(peer.blocks_of(check.block_ids))
        if not 0 < len(check.block_ids) <= MAX_CHECK_BLOCKS or not names_all:
            raise BadFrame(
                f"a check of {len(check.block_ids)} blocks of transfer {check.transfer_id}: too many, or not its own"
            )
        for other_importer, check_id in self._under_way:
            other = self._under_way[other_importer, check_id]
            if other_importer == importer and check.transfer_id == other.transfer_id:
                raise BadFrame(f"a second check of transfer {check.transfer_id} before the first was answered")
        self._under_way[importer, check.check_id] = check
        self.jobs.append(CheckJob(importer, check.check_id, tuple(check.block_ids), peer.layers))

    def computed(
        self, result: CheckResult, is_wanted: Callable[[bytes, Check], bool]
    ) -> list[tuple[bytes, Checksums | Failed]]:
        """The answer. There is none to a check whose export is over: its blocks may hold anything by now."""
        importer = result.job.importer
        if importer is None or not (check := self._under_way.pop((importer, result.job.check_id), None)):
            return []
        if not is_wanted(importer, check):
            return []
        if result.reason:
            return [(importer, Failed(check.transfer_id, "transport", f"no checksums: {result.reason}"))]
        return [(importer, Checksums(check.transfer_id, check.check_id, result.values))]
