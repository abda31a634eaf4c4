"""What a rank tells its worker host, and what it hears from it. Without a host, nothing."""

import logging
import os
from collections.abc import Mapping

import zmq

from kvtransfer.endpoint.exporting.exporter import Exporter
from kvtransfer.endpoint.frames import BadFrame, encode, from_host
from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.endpoint.peers import PeerKey, RankIdentity
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.endpoint.sockets import open_socket, waiting_messages
from kvtransfer.host_messages import (
    DropExports,
    ExportStarted,
    FirstToken,
    FromRank,
    HoldExports,
    ImportClosed,
    MeetExporters,
    RankReady,
    RankStats,
)
from kvtransfer.layout import CacheMap
from kvtransfer.transfers.imports import ClosedImport
from kvtransfer.trust.door import call_with_key
from kvtransfer.trust.key import ClusterKey

log = logging.getLogger("twinpool.kvtransfer")

_STATS_EVERY_S = 1.0


class HostReports:
    """Used by the endpoint's thread only. `socket` is None without a host."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: EndpointSettings,
        cache: CacheMap,
        identity: RankIdentity,
        address: str,
        exporter: Exporter,
        importer: Importer,
        key: ClusterKey | None = None,
    ) -> None:
        """`key`: for a host on another machine."""
        self.socket: zmq.Socket[bytes] | None = None
        self._settings = settings
        self._exporter = exporter
        self._importer = importer
        self._ready = RankReady(
            settings.rank,
            address,
            identity.epoch,
            cache.layout.fingerprint(),
            cache.layout.fields(),
            cache.num_blocks,
            cache.layout.block_bytes,
            os.getpid(),
        )
        self._reported: RankStats | None = None
        self.current = self._count(0, {})
        """What `RankEndpoint.stats` tells."""
        self._next_stats_s = 0.0
        if settings.report_to:
            self.socket = open_socket(context, zmq.DEALER, settings, settings.report_to)
            self.socket.sndhwm = 1000  # a host that reads nothing loses reports, not our memory
            call_with_key(self.socket, settings.report_to, key)
            self.socket.connect(settings.report_to)

    def started(self) -> None:
        self._send(self._ready)

    def events(self, started: list[str], closed: list[ClosedImport]) -> None:
        """Rank 0 speaks for all: what happened to a transfer happened on every rank."""
        if self._settings.rank != 0:
            return
        for transfer_id in started:
            self._send(ExportStarted(transfer_id))
        for closing in closed:
            self._send(
                ImportClosed(
                    closing.transfer_id,
                    closing.outcome,
                    closing.failure_kind,
                    closing.link,
                    closing.bytes_moved,
                    closing.num_tokens,
                    closing.attached_to_done_s,
                    closing.done_to_loaded_s,
                    closing.copy_s,
                    closing.bytes_left_at_done,
                )
            )

    @property
    def is_due(self) -> bool:
        """The host has not yet heard the current counts."""
        return self.socket is not None and self.current != self._reported

    def refresh(self, now_s: float, bad_frames: int, refused: Mapping[str, int]) -> None:
        """Count again; report what changed, but not too often. `refused`: connections, by reason."""
        self.current = self._count(bad_frames, refused)
        if self.is_due and now_s >= self._next_stats_s:
            self._next_stats_s = now_s + _STATS_EVERY_S
            self._reported = self.current
            self._send(self.current)

    def receive(self, now_s: float) -> int:
        """Obey the host. Returns the number of frames that were no message."""
        bad_frames = 0
        for frames in waiting_messages(self.socket) if self.socket else ():
            try:
                if len(frames) != 1:
                    raise BadFrame(f"{len(frames)} frames where one was expected")
                message = from_host(frames[0].buffer)
            except BadFrame as error:
                bad_frames += 1
                log.warning("bad_frame from=host reason=%r", str(error))
                continue
            match message:
                case DropExports(transfer_ids):
                    self._exporter.drop(now_s, transfer_ids)
                case HoldExports(transfer_ids):
                    self._exporter.hold(now_s, transfer_ids)
                case FirstToken(transfer_id, token):
                    self._importer.give_first_token(now_s, transfer_id, token)
                case MeetExporters(workers):
                    for ranks in filter(None, workers):
                        self._importer.meet(now_s, [PeerKey(*rank) for rank in ranks])
        return bad_frames

    def close(self, linger_ms: int) -> None:
        if self.socket:
            self.socket.close(linger_ms)

    def _count(self, bad_frames: int, refused: Mapping[str, int]) -> RankStats:
        importer, exporter = self._importer, self._exporter
        return RankStats(
            self._settings.rank,
            exporter.num_open,
            importer.num_open,
            dict(importer.bytes_in),
            dict(importer.copy_s),
            dict(importer.failures + exporter.failures),
            bad_frames,
            importer.peers(),
            dict(exporter.bytes_out),
            dict(exporter.copy_out_s),
            exporter.leases(),
            dict(refused),
            dict(importer.copies_in),
        )

    def _send(self, message: FromRank) -> None:
        if self.socket is None:
            return
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("host_report_lost message=%s", type(message).__name__)
