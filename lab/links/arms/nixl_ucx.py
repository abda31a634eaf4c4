"""NIXL with its UCX backend, the way vLLM's NixlConnector uses it.

Both sides register the cache; the importer prepares descriptors of all pieces once, makes one READ per transfer from
their indices, and asks for its state until it is done. UCX chooses how to move the bytes; UCX_TLS can restrict it.
"""

import base64
import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.links.arms.block_cache import piece_addresses
from lab.links.arms.kinds import ArmFailed, ArmUnusable, ExporterSide, ImporterSide, Offers, Site
from lab.links.messages import Transfer

_POLL_S = 0.0002
"""Short beside any transfer measured here, and leaves the core to NIXL's own thread."""


def _agent(site: Site, name: str) -> Any:
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise ArmUnusable(f"the package nixl cannot be imported: {error}. Install twinpool's extra `peers`.") from error
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        cache = site.cache
        regions = [(address, cache.layer_bytes, 0, "") for address in cache.layer_addresses]
        agent.register_memory(regions, "DRAM")
    except Exception as error:
        raise ArmUnusable(f"NIXL does not start here: {error!r}") from error
    return agent


class Exporter(ExporterSide):
    def __init__(self, site: Site) -> None:
        self._agent = _agent(site, f"lab-exporter-{os.getpid()}")
        self.offers = {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "addresses": ",".join(map(str, site.cache.layer_addresses)),
        }

    def close(self) -> None:
        del self._agent


class Importer(ImporterSide):
    def __init__(self, site: Site, offers: Offers) -> None:
        self._cache = site.cache
        self._agent = _agent(site, f"lab-importer-{os.getpid()}")
        every_block = list(range(site.cache.num_blocks))
        theirs = [int(address) for address in offers["addresses"].split(",")]
        try:
            name = self._agent.add_remote_agent(base64.b64decode(offers["metadata"]))
            name = name.decode() if isinstance(name, bytes) else name
            ours = self._descriptors(site.cache.piece_addresses(every_block))
            self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")
            remote = self._descriptors(piece_addresses(theirs, site.cache.shape, every_block))
            self._remote = self._agent.prep_xfer_dlist(name, remote, "DRAM")
        except Exception as error:
            raise ArmUnusable(f"NIXL cannot reach the exporter: {error!r}") from error

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        indices = [(self._indices(transfer.target_ids), self._indices(transfer.source_ids)) for transfer in transfers]
        started_s = time.perf_counter()
        handles = [
            self._agent.make_prepped_xfer("READ", self._local, ours, self._remote, theirs) for ours, theirs in indices
        ]
        states = {handle: self._agent.transfer(handle) for handle in handles}
        while "PROC" in states.values() and time.perf_counter() - started_s < timeout_s:
            time.sleep(_POLL_S)
            states = {
                handle: self._agent.check_xfer_state(handle) if state == "PROC" else state
                for handle, state in states.items()
            }
        seconds = time.perf_counter() - started_s
        if set(states.values()) != {"DONE"}:
            raise ArmFailed(f"NIXL's transfers are {sorted(set(states.values()))} after {seconds:.1f} s")
        for handle in handles:
            self._agent.release_xfer_handle(handle)
        return seconds

    def close(self) -> None:
        self._agent.release_dlist_handle(self._local)
        self._agent.release_dlist_handle(self._remote)
        del self._agent

    def _descriptors(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[piece, (address, bytes, device)]"""
        flat = addresses.ravel()
        lengths = np.full(len(flat), self._cache.shape.piece_bytes, dtype=np.uint64)
        return np.stack((flat, lengths, np.zeros_like(flat)), axis=1)

    def _indices(self, block_ids: Sequence[int]) -> NDArray[np.int32]:
        """Of the pieces of these blocks among the descriptors."""
        layers = np.arange(self._cache.shape.num_layers, dtype=np.int32)[:, None] * self._cache.num_blocks
        return (layers + np.array(block_ids, dtype=np.int32)[None, :]).astype(np.int32).ravel()
