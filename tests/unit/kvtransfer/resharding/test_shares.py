"""Copies between ranks of workers with different numbers of ranks, layouts and block sizes, byte by byte."""

import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.copy_plan import CopyPlan, payload_bytes, plan_copy
from kvtransfer.layout import Region
from kvtransfer.links.zmq_frames import gather, scatter
from kvtransfer.resharding.forms import CPU_PLANES, TOKEN_ROWS, CacheForm, LayerForm
from kvtransfer.resharding.heads import plan_sources
from kvtransfer.resharding.shares import NotShareable, Share, share
from tests.unit.kvtransfer.resharding.sharded_cache import LAYOUTS, LLAMA_70B, MLA, Model, RankCache, fp8, worker

TP_SIZES = (1, 2, 4, 8)
TINY = Model(total_heads=4, head_size=2)


def form_of(cache: RankCache) -> CacheForm:
    form = cache.map.layout.form
    assert form is not None
    return form


def shared_by(exporter: RankCache, exporter_rank: int, importer: RankCache, importer_rank: int) -> Share:
    return share(form_of(exporter), exporter_rank, form_of(importer), importer_rank)


def units(block_ids: list[int], per_block: int, number: int) -> list[int]:
    return [block * per_block + i for block in block_ids for i in range(per_block)][:number]


class Copy:
    """All that one rank of the importer does to get its heads of a prompt."""

    def __init__(self, exporters: list[RankCache], importers: list[RankCache], num_tokens: int) -> None:
        self.exporters, self.importers, self.num_tokens = exporters, importers, num_tokens
        self.sources = plan_sources(len(exporters), len(importers), exporters[0].model.total_heads)

    def regions(self, importer_rank: int, theirs: list[int], ours: list[int]) -> list[
        tuple[list[int], list[int], list[Region], list[Region]]
    ]:  # fmt: skip
        """Per source: unit ids and regions of both sides, in the order of `plan_copy`."""
        found = []
        importer = self.importers[importer_rank]
        for source in self.sources[importer_rank]:
            exporter = self.exporters[source.exporter_rank]
            common = shared_by(exporter, source.exporter_rank, importer, importer_rank)
            if not source.num_heads:
                continue
            number = -(-self.num_tokens // common.units.block_size)
            found.append((
                units(theirs, common.units.exporter_per_block, number),
                units(ours, common.units.importer_per_block, number),
                list(itertools.chain(*exporter.map.cut(common.exporter))),
                list(itertools.chain(*importer.map.cut(common.importer))),
            ))  # fmt: skip
            assert payload_bytes(1, found[-1][3]) == common.units.block_bytes
        return found


def carry_out(plan: CopyPlan) -> None:
    for target, source, length in zip(plan.targets.tolist(), plan.sources.tolist(), plan.lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)


def assert_nothing_is_written_twice(plans: list[CopyPlan]) -> None:
    starts = np.concatenate([plan.targets for plan in plans])
    order = np.argsort(starts)
    ends = np.concatenate([plan.targets + plan.lengths for plan in plans])[order]
    assert (ends[:-1] <= starts[order][1:]).all()


def blocks_for(num_tokens: int, block_size: int, first: int) -> list[int]:
    """Not all consecutive."""
    return [first + i + (i > 1) for i in range(-(-num_tokens // block_size))]


def check(exporters: list[RankCache], importers: list[RankCache], num_tokens: int, through_buffer: bool) -> int:
    """Copies a prompt and compares all of it; returns the number of pieces that took."""
    prompt = exporters[0].model.prompt(num_tokens)
    theirs = blocks_for(num_tokens, exporters[0].block_size, 1)
    ours = blocks_for(num_tokens, importers[0].block_size, 3)
    for exporter in exporters:
        exporter.write(prompt, theirs)
    copy = Copy(exporters, importers, num_tokens)
    num_pieces = 0
    for rank, importer in enumerate(importers):
        plans = []
        for arguments in copy.regions(rank, theirs, ours):
            plan = plan_copy(*arguments)
            plans.append(plan)
            num_pieces += len(plan)
            if through_buffer:
                their_units, our_units, sources, targets = arguments
                buffer = np.empty(payload_bytes(len(their_units), sources), dtype=np.uint8)
                scatter(gather(their_units, sources, buffer), our_units, targets)
            else:
                carry_out(plan)
        assert_nothing_is_written_twice(plans)
        assert np.array_equal(importer.read(ours, num_tokens), importer.expected(prompt)), rank
        for layer in importer.layers:
            rest = [block for block in range(importer.num_blocks) if block not in ours]
            assert not layer[rest].any(), "written into somebody else's block"
        written = sum(plan.num_bytes for plan in plans)
        tokens = min(exporters[0].block_size, importer.block_size)
        per_token = importer.map.layout.block_bytes // importer.block_size
        assert written == -(-num_tokens // tokens) * tokens * per_token, "every byte of every needed unit"
    return num_pieces


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("importer_tp", TP_SIZES)
@pytest.mark.parametrize("exporter_tp", TP_SIZES)
def test_llama_70b_is_bit_exact_for_every_tp_pair_in_every_layout(
    exporter_tp: int, importer_tp: int, layout: str
) -> None:
    exporters, importers = (worker(LLAMA_70B, tp, 16, layout, 8) for tp in (exporter_tp, importer_tp))
    check(exporters, importers, num_tokens=50, through_buffer=layout != "LBHNC")


@pytest.mark.parametrize(
    "model", [fp8(LLAMA_70B), MLA, Model(2, 64), fp8(Model(4, 64))], ids=["fp8", "MLA", "2 heads", "4 heads fp8"]
)
@pytest.mark.parametrize("importer_tp", TP_SIZES)
@pytest.mark.parametrize("exporter_tp", TP_SIZES)
def test_replicated_heads_and_other_types_are_bit_exact(exporter_tp: int, importer_tp: int, model: Model) -> None:
    exporters, importers = (worker(model, tp, 16, "LBNHC", 8) for tp in (exporter_tp, importer_tp))
    check(exporters, importers, num_tokens=37, through_buffer=True)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_other_sizes_are_bit_exact(layout: str, tp: tuple[int, int], sizes: tuple[int, int]) -> None:
    model = Model(4, 16)
    exporters, importers = (worker(model, t, size, layout, 12) for t, size in zip(tp, sizes, strict=True))
    for num_tokens in (1, 16, 17, 70):
        check(exporters, importers, num_tokens, through_buffer=num_tokens > 16)
        for importer in importers:
            for layer in importer.layers:
                layer[:] = 0


@settings(max_examples=150)
@given(st.data())
def test_every_byte_arrives_once_whatever_the_two_caches_look_like(data: st.DataObject) -> None:
    total_heads = data.draw(st.sampled_from([1, 2, 4, 8]), "heads")
    model = Model(
        total_heads, data.draw(st.sampled_from([1, 2, 6]), "head size"), data.draw(st.integers(1, 3), "layers")
    )
    model = replace(model, kv_dtype=data.draw(st.sampled_from(["bfloat16", "fp8_e4m3"]), "type"))
    tps = [data.draw(st.sampled_from(TP_SIZES), "tp") for _ in range(2)]
    small, ratio = data.draw(st.sampled_from([1, 2, 4]), "block size"), data.draw(st.sampled_from([1, 2, 3]), "ratio")
    sizes = data.draw(st.permutations([small, small * ratio]), "sizes")
    order = data.draw(
        st.sampled_from(
            [LAYOUTS[i:j] for i, j in ((6, 7),)] + [("LBHNC", "LHBNC", "BLHNC", "BHLNC"), ("LBNHC", "BLNHC")]
        )
    )
    layouts = [data.draw(st.sampled_from(order), "layout") for _ in range(2)]
    num_tokens = data.draw(st.integers(1, 3 * small * ratio), "tokens")
    num_blocks = 5 + 3 * ratio
    exporters, importers = (
        worker(model, tp, size, layout, num_blocks) for tp, size, layout in zip(tps, sizes, layouts, strict=True)
    )
    check(exporters, importers, num_tokens, through_buffer=data.draw(st.booleans(), "through a buffer"))


def test_blocks_in_head_order_are_one_piece_per_layer_and_block() -> None:
    exporters, importers = worker(LLAMA_70B, 2, 16), worker(LLAMA_70B, 1, 16)
    copy = Copy(exporters, importers, 48)
    plans = [plan_copy(*arguments) for arguments in copy.regions(0, [1, 2, 3], [4, 5, 6])]
    assert [len(plan) for plan in plans] == [2 * 3, 2 * 3]


def test_heads_outside_of_the_blocks_are_one_piece_per_layer_and_head() -> None:
    exporters, importers = worker(LLAMA_70B, 2, 16, "LHBNC"), worker(LLAMA_70B, 1, 16, "LHBNC")
    copy = Copy(exporters, importers, 48)
    plans = [plan_copy(*arguments) for arguments in copy.regions(0, [1, 2, 3], [4, 5, 6])]
    assert [len(plan) for plan in plans] == [2 * 4, 2 * 4]


def test_equal_workers_copy_whole_blocks() -> None:
    """Consecutive blocks of a layer are one piece, as without resharding."""
    for layout in ("LBHNC", "LBNHC", CPU_PLANES):
        exporters, importers = worker(LLAMA_70B, 2, 16, layout), worker(LLAMA_70B, 2, 16, layout)
        ((ids, ours, sources, targets),) = Copy(exporters, importers, 48).regions(1, [1, 2, 3], [4, 5, 6])
        assert len(plan_copy(ids, ours, sources, targets)) == 2, layout


FORM = CacheForm(1, 4, 4, 16, TOKEN_ROWS, ((2, LayerForm(1 << 12, 1 << 10, 64, 64, 2)),))
OTHER_LAYER = FORM.layers[0][1]


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (replace(FORM, block_size=24), "neither divides"),
        (replace(FORM, content_format="else"), "contents are"),
        (replace(FORM, total_kv_heads=8, num_kv_heads=8), "4 and 8 KV heads"),
        (replace(FORM, num_kv_heads=2), "KV heads per rank"),
        (replace(FORM, tp_size=3), "evenly"),
        (replace(FORM, tp_size=0), "no rank"),
        (replace(FORM, layers=((10**15, OTHER_LAYER),)), "layers"),
        (replace(FORM, layers=((-1, OTHER_LAYER), (3, OTHER_LAYER))), "not positive"),
        (replace(FORM, layers=((2, replace(OTHER_LAYER, head_stride=0)),)), "not positive"),
        (replace(FORM, layers=((2, replace(OTHER_LAYER, content=32)),)), "another size"),
        (replace(FORM, layers=((2, replace(OTHER_LAYER, head_stride=64, token_stride=256)),)), "another order"),
    ],
)
def test_what_a_peer_says_of_itself_is_not_believed_blindly(other: CacheForm, complaint: str) -> None:
    with pytest.raises(NotShareable, match=complaint):
        share(FORM, 0, other, 0)


def test_a_block_of_unknown_content_is_moved_whole_or_not_at_all() -> None:
    unknown = replace(FORM, content_format="cpu amx")
    assert share(unknown, 0, unknown, 0).units.block_size == 16
    with pytest.raises(NotShareable, match="cannot be cut"):
        share(unknown, 0, replace(unknown, block_size=32), 0)
