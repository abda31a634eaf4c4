"""Mooncake's transfer engine over TCP, with asynchronous batches, one per transfer.

Its connection pool is on, as SGLang sets it: without it every piece opens a connection of its own, which is slower by
far and runs out of ports. The queues are as long as they can be made, since a batch that does not fit fails.
"""

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from lab.links.arms.block_cache import piece_addresses
from lab.links.arms.kinds import ArmFailed, ArmUnusable, ExporterSide, ImporterSide, Offers, Site
from lab.links.messages import Transfer

_ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}


def _engine(site: Site) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        needed = "libibverbs" in str(error)
        remedy = "Install that library (Debian: libibverbs1)." if needed else "Install twinpool's extra `peers`."
        raise ArmUnusable(f"the package mooncake cannot be imported: {error}. {remedy}") from error
    engine = module.TransferEngine()
    if status := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise ArmUnusable(f"Mooncake's transfer engine does not start here: initialize returned {status}")
    for address in site.cache.layer_addresses:
        if status := engine.register_memory(address, site.cache.layer_bytes):
            raise ArmUnusable(f"Mooncake cannot register the cache: register_memory returned {status}")
    return engine


class Exporter(ExporterSide):
    def __init__(self, site: Site) -> None:
        self._engine = _engine(site)
        self.offers = {
            "session": f"127.0.0.1:{self._engine.get_rpc_port()}",
            "addresses": ",".join(map(str, site.cache.layer_addresses)),
        }

    def close(self) -> None:
        del self._engine


class Importer(ImporterSide):
    def __init__(self, site: Site, offers: Offers) -> None:
        self._cache = site.cache
        self._session = offers["session"]
        self._addresses = [int(address) for address in offers["addresses"].split(",")]
        self._engine = _engine(site)

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        shape = self._cache.shape
        lists = []
        for transfer in transfers:
            ours = self._cache.piece_addresses(transfer.target_ids).ravel().tolist()
            theirs = piece_addresses(self._addresses, shape, transfer.source_ids).ravel().tolist()
            lists.append((ours, theirs, [shape.piece_bytes] * len(ours)))
        started_s = time.perf_counter()
        batches = [self._engine.batch_transfer_async_read(self._session, *pieces) for pieces in lists]
        if 0 in batches:
            raise ArmFailed("Mooncake refused a batch")
        if status := self._engine.get_batch_transfer_status(batches):
            raise ArmFailed(f"Mooncake's transfers failed: status {status}")
        return time.perf_counter() - started_s

    def close(self) -> None:
        del self._engine
