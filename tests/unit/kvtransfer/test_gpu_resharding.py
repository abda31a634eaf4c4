"""Workers with several ranks on fake GPUs: each gets its heads over the links that GPUs have."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.resharding.forms import TOKEN_ROWS
from kvtransfer.resharding.heads import heads_of, plan_sources
from tests.unit.kvtransfer.gpu_pair import GpuCluster, GpuRank
from tests.unit.kvtransfer.rank_pair import FACTS, PROMPT_HASH

TOTAL_HEADS = 4
CONTENT = 96
NUM_TOKENS = 30


@pytest.fixture
def gpus(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCluster]:
    with GpuCluster(directory, monkeypatch).closing() as cluster:
        yield cluster


def worker(gpus: GpuCluster, tp_size: int, block_size: int, links: tuple[str, ...], first_device: int) -> list[GpuRank]:
    num_heads = heads_of(0, tp_size, TOTAL_HEADS).count
    facts = replace(
        FACTS, num_kv_heads=num_heads, block_size=block_size, tp_size=tp_size, total_kv_heads=TOTAL_HEADS,
        content_format=TOKEN_ROWS,
    )  # fmt: skip
    shape = (num_heads, block_size, CONTENT)
    return [
        gpus.rank(device=(first_device + rank) % 4, links=links, rank=rank, block_shape=shape, facts=facts)
        for rank in range(tp_size)
    ]


def tokens_of(rank: GpuRank, block_ids: list[int]) -> np.ndarray:
    """[layer, head, token, content]"""
    blocks = rank.blocks(block_ids)  # [layer, block, head, token, content]
    layers, num_blocks, heads, tokens, content = blocks.shape
    return np.asarray(blocks.transpose(0, 2, 1, 3, 4).reshape(layers, heads, num_blocks * tokens, content))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("link", ["cuda_ipc", "nccl"])
def test_every_rank_gets_its_heads(gpus: GpuCluster, link: str, tp: tuple[int, int], sizes: tuple[int, int]) -> None:
    exporters = worker(gpus, tp[0], sizes[0], (link, "zmq"), first_device=0)
    importers = worker(gpus, tp[1], sizes[1], (link, "zmq"), first_device=1)
    addresses = [(rank.endpoint.address, rank.endpoint.epoch) for rank in exporters]
    theirs, ours = (
        [first + 2 * i for i in range(-(-NUM_TOKENS // size))] for first, size in zip((1, 20), sizes, strict=True)
    )
    for rank in importers:
        rank.endpoint.open_sharded_import("t", addresses, PROMPT_HASH, NUM_TOKENS, True)
        rank.endpoint.place_import("t", 0, ours)
    for rank in exporters:
        rank.export("t", theirs, NUM_TOKENS)
    for number, importer in enumerate(importers):
        closed = importer.closed_import()
        assert (closed.outcome, closed.link, closed.reason) == ("loaded", link, "")
        mine = heads_of(number, tp[1], TOTAL_HEADS)
        got = tokens_of(importer, ours)[:, :, :NUM_TOKENS]
        for source in plan_sources(*tp, TOTAL_HEADS)[number]:
            held = heads_of(source.exporter_rank, tp[0], TOTAL_HEADS)
            both = held.shared_with(mine)
            if source.num_heads:
                sent = tokens_of(exporters[source.exporter_rank], theirs)[:, :, :NUM_TOKENS]
                here, there = (slice(both.first - at.first, both.end - at.first) for at in (mine, held))
                assert np.array_equal(got[:, here], sent[:, there])
    for exporter in exporters:
        assert exporter.closed_export().outcome == "released"
