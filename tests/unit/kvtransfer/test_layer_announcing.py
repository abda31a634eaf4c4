"""Ranks over real sockets, when the exporter announces layers of the last chunk: what is left when the prompt ends."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.rank_endpoint import RankEndpoint
from tests.unit.kvtransfer.gpu_pair import GpuCluster
from tests.unit.kvtransfer.rank_pair import BLOCK_SIZE, NUM_LAYERS, PROMPT_HASH, Cluster, Rank, eventually
from tests.unit.kvtransfer.test_rank_endpoint_resharding import MODEL, TOKEN, Worker

Pair = tuple[Rank, Rank]

NUM_TOKENS = 5 * BLOCK_SIZE - 1
FIRST_CHUNK = 2 * BLOCK_SIZE
THEIRS, OURS = [5, 6, 7, 30, 2], [10, 11, 40, 41, 42]


def layer_bytes(rank: Rank) -> int:
    """Of one block."""
    return rank.map.layout.layer_bytes[0]


def copied(endpoint: RankEndpoint) -> int:
    return sum(endpoint.stats().bytes_in.values())


def compute_all_but_the_last_layer(exporter: Rank, block_ids: list[int]) -> None:
    """Two chunks, the second of them layer by layer; nothing of its last layer is in the cache yet."""
    exporter.endpoint.announce("t", block_ids[:2], FIRST_CHUNK)
    for num_layers in range(1, NUM_LAYERS):
        exporter.endpoint.announce("t", block_ids, NUM_TOKENS, num_layers)


@pytest.mark.parametrize("num_cached", [0, 1, 3], ids=lambda number: f"{number} blocks cached")
def test_only_the_last_group_is_left_when_the_prompt_ends(pair: Pair, num_cached: int) -> None:
    exporter, importer = pair
    last_layer = exporter.cache[f"layers.{NUM_LAYERS - 1}.attention"]
    computed = last_layer[THEIRS[2:]].copy()
    last_layer[THEIRS[2:]] = 0
    exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
    importer.import_("t", exporter, OURS[num_cached:], NUM_TOKENS, first_block=num_cached)

    compute_all_but_the_last_layer(exporter, THEIRS)
    num_lacking = len(THEIRS) - num_cached
    num_of_last_chunk = min(num_lacking, 3)
    left = num_of_last_chunk * layer_bytes(importer)
    eventually(lambda: copied(importer.endpoint) == num_lacking * importer.map.layout.block_bytes - left)
    assert not importer.has_closed(0.05)

    last_layer[THEIRS[2:]] = computed
    exporter.endpoint.finish_export("t", THEIRS, NUM_TOKENS, 7)
    closed = importer.closed_import()
    assert (closed.outcome, closed.first_token) == ("loaded", 7)
    assert closed.bytes_moved == num_lacking * importer.map.layout.block_bytes, "nothing was copied twice"
    assert importer.holds(OURS[num_cached:], exporter, THEIRS[num_cached:])
    assert exporter.closed_export().outcome == "released"


def test_an_importer_that_comes_late_hears_of_the_layers(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
    compute_all_but_the_last_layer(exporter, THEIRS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    eventually(lambda: copied(importer.endpoint) == 5 * importer.map.layout.block_bytes - 3 * layer_bytes(importer))
    exporter.endpoint.finish_export("t", THEIRS, NUM_TOKENS, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds(OURS, exporter, THEIRS)


def test_layers_of_a_preempted_prefill_do_not_count(pair: Pair) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    compute_all_but_the_last_layer(exporter, THEIRS)
    eventually(lambda: copied(importer.endpoint))
    exporter.endpoint.restart_export("t")
    for cache in exporter.cache.values():
        cache[THEIRS] = 0
    again = [50, 51, 5, 6, 7]
    compute_all_but_the_last_layer(exporter, again)
    exporter.endpoint.finish_export("t", again, NUM_TOKENS, 7)
    assert importer.closed_import().outcome == "loaded"
    assert importer.holds(OURS, exporter, again)


@pytest.mark.parametrize("end", ["abort", "cancel"])
def test_a_transfer_that_ends_in_mid_chunk_gives_all_blocks_back(pair: Pair, end: str) -> None:
    exporter, importer = pair
    exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS, wants_first_token=False)
    compute_all_but_the_last_layer(exporter, THEIRS)
    eventually(lambda: copied(importer.endpoint))
    if end == "abort":
        exporter.endpoint.abort_export("t", "for a test")
        closed = importer.closed_import()
        assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "aborted", OURS)
        assert exporter.closed_export().outcome == "aborted"
    else:
        importer.endpoint.cancel_import("t")
        assert importer.closed_import().outcome == "cancelled"
        exporter.endpoint.finish_export("t", THEIRS, NUM_TOKENS, 7)
        assert exporter.closed_export().outcome == "released"


def test_no_layer_is_written_before_it_was_announced(pair: Pair) -> None:
    exporter, importer = pair
    before = {layer: cache[OURS].copy() for layer, cache in importer.cache.items()}
    exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    exporter.endpoint.announce("t", THEIRS, NUM_TOKENS, 1)
    eventually(lambda: copied(importer.endpoint) == 5 * layer_bytes(importer))
    for layer in list(before)[1:]:
        assert np.array_equal(importer.cache[layer][OURS], before[layer])
    exporter.endpoint.finish_export("t", THEIRS, NUM_TOKENS, 7)
    assert importer.closed_import().outcome == "loaded"


@pytest.mark.parametrize(("tp", "block_sizes"), [((2, 1), (16, 32)), ((1, 2), (32, 16)), ((4, 2), (16, 16))], ids=str)
def test_every_rank_has_all_but_the_last_group_of_its_heads(
    cluster: Cluster, link: str, tp: tuple[int, int], block_sizes: tuple[int, int]
) -> None:
    exporter, importer = (
        Worker(cluster, size, MODEL, block_size, "LBHNC", links=(link,))
        for size, block_size in zip(tp, block_sizes, strict=True)
    )
    with closing(exporter), closing(importer):
        num_tokens = 58
        prompt = MODEL.prompt(num_tokens)
        theirs, ours = (
            list(range(-(-num_tokens // block_sizes[0]))),
            list(range(5, 5 - (-num_tokens // block_sizes[1]))),
        )
        importer.attach("t", exporter, num_tokens)
        importer.place("t", ours)
        for endpoint, cache in zip(exporter.endpoints, exporter.caches, strict=True):
            cache.write(prompt, theirs)
            endpoint.open_export("t", PROMPT_HASH, num_tokens)
            endpoint.announce("t", theirs, num_tokens, 1)
        num_units = -(-num_tokens // min(block_sizes))
        units_per_block = block_sizes[1] // min(block_sizes)
        unit_bytes = [cache.map.layout.block_bytes // units_per_block for cache in importer.caches]
        for endpoint, bytes_ in zip(importer.endpoints, unit_bytes, strict=True):
            eventually(lambda endpoint=endpoint, bytes_=bytes_: copied(endpoint) == num_units * bytes_ // 2)
        for endpoint in exporter.endpoints:
            endpoint.finish_export("t", theirs, num_tokens, TOKEN)
        assert [end.outcome for end in importer.closed_imports()] == ["loaded"] * tp[1]
        assert [end.bytes_moved for end in importer.closed_imports()] == [num_units * bytes_ for bytes_ in unit_bytes]
        assert importer.holds(prompt, ours)
        assert exporter.closed_exports() == ["released"] * tp[0]


@pytest.mark.parametrize("gpu_link", ["cuda_ipc", "nccl"])
def test_layers_move_between_gpus(directory: Path, monkeypatch: pytest.MonkeyPatch, gpu_link: str) -> None:
    with GpuCluster(directory, monkeypatch).closing() as gpus:
        exporter, importer = gpus.rank(device=0, links=(gpu_link,)), gpus.rank(device=1, links=(gpu_link,))
        exporter.endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
        importer.import_("t", exporter, OURS, NUM_TOKENS)
        compute_all_but_the_last_layer(exporter, THEIRS)
        block_bytes = importer.map.layout.block_bytes
        eventually(lambda: copied(importer.endpoint) == 5 * block_bytes - 3 * layer_bytes(importer))
        exporter.endpoint.finish_export("t", THEIRS, NUM_TOKENS, 7)
        closed = importer.closed_import()
        assert (closed.outcome, closed.link, closed.bytes_moved) == ("loaded", gpu_link, 5 * block_bytes)
        assert importer.holds(OURS, exporter, THEIRS)
