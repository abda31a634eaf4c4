"""A rank's end of all its KV transfers: what the engine's thread calls. Nothing here blocks except `wait` and `close`.

One thread, `kv-rank-N`, owns every socket; two more, `kv-copy-N-0` and `-1`, copy. The engine's thread leaves its
wishes in a queue and takes what has closed. Every export and every import that was opened closes exactly once:

* an export after `finish_export` or `abort_export`, and only when no importer reads its blocks any more;
* an import after `place_import` or `cancel_import`, and only when nothing writes into its blocks any more. One that
  wants a first token closes as `loaded` or `recompute` only once the token is known.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

from kvtransfer.compute_fence import ComputeFence, NoFence
from kvtransfer.endpoint.loop import EndpointLoop
from kvtransfer.endpoint.peers import PeerKey, RankIdentity
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.endpoint.sockets import Wakeup
from kvtransfer.gpu.gpu_links import open_gpu_links
from kvtransfer.host_messages import RankStats
from kvtransfer.layout import CacheMap
from kvtransfer.links.host_memory import allow_reading, host_id
from kvtransfer.transfers.export import ClosedExport
from kvtransfer.transfers.imports import ClosedImport

__all__ = ["ClosedExport", "ClosedImport", "EndpointDied", "EndpointSettings", "RankEndpoint"]

log = logging.getLogger("twinpool.kvtransfer")

Wish = ParamSpec("Wish")


class EndpointDied(RuntimeError):
    """The endpoint's thread ended on an error: no transfer of this rank will ever close."""


class RankEndpoint:
    def __init__(self, settings: EndpointSettings, cache: CacheMap) -> None:
        """Binds at once; `address` is where importers connect. Raises OSError if that fails."""
        self.epoch = uuid.uuid4().hex
        self._rank = settings.rank
        self._num_blocks = cache.num_blocks
        self._exports: list[ClosedExport] = []
        self._imports: list[ClosedImport] = []
        self._closed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closing = False
        if "host" in settings.links:
            allow_reading()
        wakeup = Wakeup()
        try:
            self._gpu = open_gpu_links(cache, settings, wakeup.set)
        except BaseException:
            wakeup.close()
            raise
        identity = RankIdentity(self.epoch, host_id(), os.getpid())
        if gpu := self._gpu:
            facts = (gpu.device_name, gpu.nccl_version, gpu.unusable, gpu.allocations)
            identity = RankIdentity(self.epoch, host_id(), os.getpid(), *facts)
        try:
            self._loop = EndpointLoop(settings, cache, identity, self._on_closed, wakeup, self._gpu)
        except BaseException:
            if self._gpu:
                self._gpu.close(timeout_s=1.0)
            raise
        self.address = self._loop.address
        self._thread = threading.Thread(target=self._run, name=f"kv-rank-{settings.rank}", daemon=True)
        self._thread.start()
        log.info("endpoint_started worker=%s rank=%d address=%s", settings.worker_id, settings.rank, self.address)

    # The exporter's side.

    def open_export(self, transfer_id: str, prompt_hash: bytes, num_prompt_tokens: int) -> None:
        """The engine has scheduled the first chunk of this prefill. Opening again while it is open changes nothing."""
        self._post(self._loop.exporter.open, transfer_id, prompt_hash, num_prompt_tokens)

    def announce(
        self, transfer_id: str, block_ids: Sequence[int], num_tokens: int, num_layers: int | None = None
    ) -> None:
        """`num_tokens` are computed and lie in `block_ids`: all blocks so far, in token order.

        With `num_layers`, only so many of the first layers are, except of tokens that were announced without it.
        """
        self._require_blocks(block_ids)
        self._post(self._loop.exporter.announce, transfer_id, list(block_ids), num_tokens, num_layers)

    def restart_export(self, transfer_id: str) -> None:
        """The engine preempted the prefill. To be called before the blocks are written again."""
        self._post(self._loop.exporter.restart, transfer_id)

    def finish_export(
        self, transfer_id: str, block_ids: Sequence[int], num_tokens: int, first_token: int | None
    ) -> None:
        """The prefill ended. The blocks must stay as they are until the export closes."""
        self._require_blocks(block_ids)
        self._post(self._loop.exporter.finish, transfer_id, list(block_ids), num_tokens, first_token)

    def abort_export(self, transfer_id: str, reason: str) -> None:
        """The prefill will not end, or its blocks are wanted back. They must stay until the export closes."""
        self._post(self._loop.exporter.abort, transfer_id, reason)

    def take_closed_exports(self) -> list[ClosedExport]:
        with self._closed:
            taken, self._exports = self._exports, []
        return taken

    # The importer's side.

    def meet(self, exporter_address: str, exporter_epoch: str) -> None:
        """Get the link to this exporter of one rank ready, so that no request has to wait for that."""
        self._post(self._loop.importer.meet, [PeerKey(exporter_address, exporter_epoch)])

    def open_import(
        self,
        transfer_id: str,
        exporter_address: str,
        exporter_epoch: str,
        prompt_hash: bytes,
        num_tokens: int,
        wants_first_token: bool,
    ) -> None:
        """As `open_sharded_import`, from an exporter with one rank."""
        exporters = [(exporter_address, exporter_epoch)]
        self.open_sharded_import(transfer_id, exporters, prompt_hash, num_tokens, wants_first_token)

    def open_sharded_import(
        self,
        transfer_id: str,
        exporters: Sequence[tuple[str, str]],
        prompt_hash: bytes,
        num_tokens: int,
        wants_first_token: bool,
        priority: int = 0,
    ) -> None:
        """Attach now, and renew from here on, to those of the exporter's ranks that hold this rank's heads.

        `exporters` are the addresses and epochs of all of its ranks, by rank; `num_tokens` is the length of its prompt.
        Where links are busy, a lower `priority` is copied first.
        """
        keys = [PeerKey(address, epoch) for address, epoch in exporters]
        self._post(self._loop.importer.open, transfer_id, keys, prompt_hash, num_tokens, wants_first_token, priority)

    def place_import(self, transfer_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Our blocks for the prompt's blocks from position `first_block` on; none when all of them are here already."""
        self._require_blocks(block_ids)
        self._post(self._loop.importer.place, transfer_id, first_block, list(block_ids))

    def give_first_token(self, transfer_id: str, token: int) -> None:
        """The token as the proxy got it; kept for a while if the import is not open yet."""
        self._post(self._loop.importer.give_first_token, transfer_id, token)

    def cancel_import(self, transfer_id: str) -> None:
        self._post(self._loop.importer.cancel, transfer_id)

    def take_closed_imports(self) -> list[ClosedImport]:
        with self._closed:
            taken, self._imports = self._imports, []
        return taken

    # Both.

    def compute_fence(self, compute_stream: Callable[[], int]) -> ComputeFence:
        """For the engine's thread, whose current CUDA stream `compute_stream` names when the cache is on a GPU."""
        return self._gpu.compute_fence(compute_stream) if self._gpu else NoFence()

    def wait(self, timeout_s: float) -> bool:
        """Until something can be taken; False when nothing could in time. Raises EndpointDied."""
        with self._closed:
            self._closed.wait_for(lambda: self._exports or self._imports or self._error, timeout_s)
            is_available = bool(self._exports or self._imports)
        self.check()
        return is_available

    def check(self) -> None:
        """Raises EndpointDied if the endpoint's thread is gone."""
        if self._error is not None:
            raise EndpointDied(
                f"The KV transfer thread of rank {self._rank} died: {self._error!r}. Restart this worker."
            ) from self._error

    def stats(self) -> RankStats:
        """Counters, at most a moment old."""
        return self._loop.stats

    def close(self, timeout_s: float = 5.0) -> None:
        """End every transfer: open imports close as cancelled, open exports as aborted. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.stop(time.monotonic() + timeout_s)
        self._thread.join(timeout_s + 2.0)
        if self._thread.is_alive():
            log.error("endpoint_stuck rank=%d", self._rank)
        else:
            self._loop.wakeup.close()

    def _post(self, method: Callable[Concatenate[float, Wish], None], *args: Wish.args, **kwargs: Wish.kwargs) -> None:
        self._loop.post(lambda now_s: method(now_s, *args, **kwargs))

    def _require_blocks(self, block_ids: Sequence[int]) -> None:
        """A wrong id here would read or write memory that is no block."""
        if len(block_ids) and (min(block_ids) < 0 or max(block_ids) >= self._num_blocks):
            raise ValueError(
                f"Block ids from {min(block_ids)} to {max(block_ids)}, but this cache has {self._num_blocks} blocks."
            )

    def _on_closed(self, exports: list[ClosedExport], imports: list[ClosedImport]) -> None:
        with self._closed:
            self._exports += exports
            self._imports += imports
            self._closed.notify_all()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            log.exception("endpoint_died rank=%d", self._rank)
            with self._closed:
                self._error = error
                self._closed.notify_all()
