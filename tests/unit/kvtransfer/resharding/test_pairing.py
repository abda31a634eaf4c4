from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.layout import probe
from kvtransfer.resharding.forms import CPU_PLANES
from kvtransfer.resharding.pairing import differing_fields
from tests.unit.kvtransfer.resharding.sharded_cache import LLAMA_70B, MLA, RankCache, fp8


def fields(tp_size: int = 1, block_size: int = 16, layout: str = "LBHNC", **facts: str) -> dict[str, str]:
    cache = RankCache(LLAMA_70B, 0, tp_size, block_size, layout, num_blocks=2)
    caches = {f"layer.{i}": view for i, view in enumerate(cache.layers)}
    return probe(caches, 2, replace(cache.facts, **facts)).layout.fields()  # type: ignore[arg-type]


@pytest.mark.parametrize("importer_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("exporter_tp", [1, 2, 4, 8])
def test_numbers_of_ranks_forbid_nothing(exporter_tp: int, importer_tp: int) -> None:
    assert differing_fields(fields(exporter_tp), fields(importer_tp)) == []


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48)])
def test_block_sizes_may_differ_where_one_divides_the_other(sizes: tuple[int, int]) -> None:
    for layout in ("LBHNC", "LBNHC", CPU_PLANES):
        assert differing_fields(*(fields(block_size=size, layout=layout) for size in sizes)) == []


def test_block_sizes_that_do_not_divide_are_named() -> None:
    (difference,) = differing_fields(fields(block_size=32), fields(block_size=48))
    assert str(difference) == "block_size (32 / 48; neither divides the other)"


def test_blocks_of_unknown_content_must_be_of_one_size() -> None:
    amx = {"content_format": "cpu amx", "attention_backend": "CPU_ATTN"}
    (difference,) = differing_fields(fields(block_size=32, **amx), fields(block_size=64, **amx))
    assert str(difference) == "block_size (32 / 64; blocks of CPU_ATTN cannot be cut between tokens)"
    assert differing_fields(fields(tp_size=2, **amx), fields(**amx)) == []


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"dtype": "float16"}, {"kv_dtype": "fp8"}, {"attention_backend": "other"},
     {"content_format": "other"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_must_be_equal_is_named_with_both_values(change: dict[str, str]) -> None:
    (name,) = change
    ours, theirs = fields(), fields(tp_size=2, **change)
    named = [difference for difference in differing_fields(ours, theirs) if difference.name != "cuttable_blocks"]
    assert [(d.name, d.exporter, d.importer) for d in named] == [(name, ours[name], change[name])]


def test_another_order_of_axes_in_memory_forbids_a_pair() -> None:
    (difference,) = differing_fields(fields(layout="LBHNC"), fields(layout="LBNHC"))
    assert str(difference) == "memory_order (head, token, content / token, head, content)"


def test_where_heads_and_layers_lie_outside_of_a_block_does_not_matter() -> None:
    assert differing_fields(fields(layout="LHBNC"), fields(layout="BLHNC")) == []


def test_one_head_per_rank_fits_either_order() -> None:
    assert differing_fields(fields(tp_size=8, layout="LBHNC"), fields(layout="LBNHC")) == []


def test_another_number_of_heads_or_layers_or_another_width_forbids_a_pair() -> None:
    ours = fields()
    for name, other in [("total_kv_heads", "4"), ("num_layers", "3"), ("head_size", "64"), ("content_bytes", "x")]:
        assert [difference.name for difference in differing_fields(ours, ours | {name: other})] == [name]


def test_a_cache_that_cannot_be_cut_must_be_equal_in_everything() -> None:
    def opaque(tp_size: int) -> dict[str, str]:
        facts = replace(LLAMA_70B.facts(tp_size, 16, "LBHNC"), num_kv_heads=4, total_kv_heads=0)
        return probe({"layer": np.zeros((4, 8))}, 4, facts).layout.fields()

    assert differing_fields(opaque(1), opaque(1)) == []
    assert [difference.name for difference in differing_fields(opaque(1), opaque(2))] == ["tp_size"]


def test_an_unknown_field_forbids_a_pair() -> None:
    (difference,) = differing_fields(fields(), fields() | {"new": "1"})
    assert str(difference) == "new (None / 1)"


def test_a_latent_cache_fits_any_number_of_ranks() -> None:
    one, four = (RankCache(MLA, 0, tp, 16).map.layout.fields() for tp in (1, 4))
    assert differing_fields(one, four) == []
    assert [d.name for d in differing_fields(one, RankCache(fp8(MLA), 0, 4, 16).map.layout.fields())] == [
        "content_bytes",
        "kv_dtype",
    ]
