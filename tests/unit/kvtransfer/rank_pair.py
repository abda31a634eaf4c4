"""Ranks with small numpy caches, talking over real sockets in one process."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import CacheMap, ModelFacts, probe
from kvtransfer.rank_endpoint import ClosedExport, ClosedImport, EndpointSettings, RankEndpoint

NUM_LAYERS = 3
NUM_BLOCKS = 64
BLOCK_SIZE = 4
PROMPT_HASH = b"hash of the prompt"

FACTS = ModelFacts(
    model="tiny", dtype="bfloat16", kv_dtype="bfloat16", num_kv_heads=2, head_size=8, block_size=BLOCK_SIZE,
    layout_name="any", attention_backend="any", tp_size=1,
)  # fmt: skip

Cache = dict[str, NDArray[np.uint16]]


def make_cache(seed: int, shape: str = "block first") -> Cache:
    """Layers of [block, 2, kv head, token * content]; `K and V apart` makes two runs of every block."""
    generator = np.random.default_rng(seed)
    inner = (2, BLOCK_SIZE * 8)
    cache = {}
    for layer in range(NUM_LAYERS):
        if shape == "block first":
            array = generator.integers(0, 1 << 16, (NUM_BLOCKS, 2, *inner), dtype=np.uint16)
        else:
            array = generator.integers(0, 1 << 16, (2, NUM_BLOCKS, *inner), dtype=np.uint16).transpose(1, 0, 2, 3)
        cache[f"layers.{layer}.attention"] = array
    return cache


class Rank:
    """A `RankEndpoint` on a cache of its own."""

    def __init__(self, settings: EndpointSettings, cache: Cache, facts: ModelFacts = FACTS) -> None:
        self.cache = cache
        self.map: CacheMap = probe(cache, NUM_BLOCKS, facts)
        self.endpoint = RankEndpoint(settings, self.map)
        self.closed_imports: list[ClosedImport] = []
        self.closed_exports: list[ClosedExport] = []

    def export(self, transfer_id: str, block_ids: list[int], num_tokens: int, first_token: int | None = 7) -> None:
        self.endpoint.open_export(transfer_id, PROMPT_HASH, num_tokens)
        self.endpoint.finish_export(transfer_id, block_ids, num_tokens, first_token)

    def attach(
        self, transfer_id: str, exporter: "Rank", num_tokens: int, wants_first_token: bool = True, **other: Any
    ) -> None:
        address = other.get("address", exporter.endpoint.address)
        epoch = other.get("epoch", exporter.endpoint.epoch)
        prompt_hash = other.get("prompt_hash", PROMPT_HASH)
        self.endpoint.open_import(transfer_id, address, epoch, prompt_hash, num_tokens, wants_first_token)

    def import_(
        self, transfer_id: str, exporter: "Rank", block_ids: list[int], num_tokens: int, first_block: int = 0,
        wants_first_token: bool = True, **other: Any,
    ) -> None:  # fmt: skip
        self.attach(transfer_id, exporter, num_tokens, wants_first_token, **other)
        self.endpoint.place_import(transfer_id, first_block, block_ids)

    def closed_import(self, transfer_id: str = "t", timeout_s: float = 20.0) -> ClosedImport:
        self.collect(lambda: any(c.transfer_id == transfer_id for c in self.closed_imports), timeout_s)
        (closed,) = [c for c in self.closed_imports if c.transfer_id == transfer_id]
        return closed

    def closed_export(self, transfer_id: str = "t", timeout_s: float = 20.0) -> ClosedExport:
        self.collect(lambda: any(c.transfer_id == transfer_id for c in self.closed_exports), timeout_s)
        (closed,) = [c for c in self.closed_exports if c.transfer_id == transfer_id]
        return closed

    def has_closed(self, within_s: float) -> bool:
        """Whether anything closes in that time."""
        self.collect(lambda: False, within_s)
        return bool(self.closed_imports or self.closed_exports)

    def collect(self, is_enough: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while True:
            self.closed_imports += self.endpoint.take_closed_imports()
            self.closed_exports += self.endpoint.take_closed_exports()
            left_s = until_s - time.monotonic()
            if is_enough() or left_s <= 0:
                return
            self.endpoint.wait(left_s)

    def holds(self, block_ids: list[int], exporter: "Rank", their_ids: list[int]) -> bool:
        return all(
            np.array_equal(self.cache[layer][block_ids], exporter.cache[layer][their_ids]) for layer in self.cache
        )


class Cluster:
    """Makes ranks and closes them. Durations are short so that tests are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ranks: list[Rank] = []

    def settings(self, name: str = "", **changes: Any) -> EndpointSettings:
        name = name or f"rank-{random.randrange(1 << 40):x}"
        settings = EndpointSettings(
            rank=0, bind=f"ipc://{self.directory}/{name}", lease_first_s=5, beat_s=0.3, lease_renew_s=2,
            attach_wait_s=0.5, peer_heartbeat_s=0.2, peer_lost_after_s=1, stalled_after_s=1, chunk_bytes=1500,
        )  # fmt: skip
        return replace(settings, **changes)

    def rank(self, shape: str = "block first", facts: ModelFacts = FACTS, **changes: Any) -> Rank:
        rank = Rank(self.settings(**changes), make_cache(len(self._ranks), shape), facts)
        self._ranks.append(rank)
        return rank

    def close(self) -> None:
        for rank in self._ranks:
            rank.endpoint.close(timeout_s=1)


def is_known_whole(rank: Rank, transfer_id: str) -> bool:
    """The importer has heard that the transfer's prefill ended."""
    whole = rank.endpoint._loop.importer._imports.get(transfer_id)
    return whole is not None and all(shard._done is not None for shard in whole.shards)


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition never came true"
        time.sleep(0.005)
