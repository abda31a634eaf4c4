import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.resharding.heads import HeadRange, UnevenHeads, heads_of, plan_sources

TP_SIZES = st.sampled_from([1, 2, 4, 8])
TOTAL_HEADS = st.sampled_from([1, 2, 4, 8, 16])


def test_heads_are_split_evenly_and_in_order() -> None:
    assert [heads_of(rank, 4, 8) for rank in range(4)] == [HeadRange(first, 2) for first in (0, 2, 4, 6)]


def test_with_more_ranks_than_heads_consecutive_ranks_hold_the_same_head() -> None:
    """As vLLM's QKVParallelLinear loads them: head `rank // (ranks / heads)`."""
    assert [heads_of(rank, 8, 2).first for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("rank", "tp_size", "total"), [(0, 3, 8), (0, 8, 3), (4, 4, 8), (-1, 4, 8), (0, 0, 8), (0, 1, 0)]
)
def test_what_no_worker_has_is_refused(rank: int, tp_size: int, total: int) -> None:
    with pytest.raises(UnevenHeads):
        heads_of(rank, tp_size, total)


@given(TP_SIZES, TP_SIZES, TOTAL_HEADS)
def test_every_head_of_an_importer_has_one_source(exporter_tp: int, importer_tp: int, total: int) -> None:
    for rank, sources in enumerate(plan_sources(exporter_tp, importer_tp, total)):
        wanted = heads_of(rank, importer_tp, total)
        read = [heads_of(s.exporter_rank, exporter_tp, total).shared_with(wanted) for s in sources if s.num_heads]
        heads = [head for part in read for head in range(part.first, part.end)]
        assert sorted(heads) == list(range(wanted.first, wanted.end))
        assert [part.count for part in read] == [s.num_heads for s in sources if s.num_heads]
        assert len({s.exporter_rank for s in sources}) == len(sources)


@given(TP_SIZES, TP_SIZES, TOTAL_HEADS)
def test_every_exporter_knows_how_many_will_attach_and_none_is_left_waiting(
    exporter_tp: int, importer_tp: int, total: int
) -> None:
    sources = [source for of_rank in plan_sources(exporter_tp, importer_tp, total) for source in of_rank]
    for rank in range(exporter_tp):
        attaching = [source for source in sources if source.exporter_rank == rank]
        assert attaching
        assert {source.importers_expected for source in attaching} == {len(attaching)}


@given(TP_SIZES, TP_SIZES, TOTAL_HEADS)
def test_no_holder_of_a_head_is_read_from_twice_before_each_was_once(
    exporter_tp: int, importer_tp: int, total: int
) -> None:
    plan = plan_sources(exporter_tp, importer_tp, total)
    reads = [s.exporter_rank for sources in plan for s in sources if s.num_heads]
    for holders in ({r for r in range(exporter_tp) if heads_of(r, exporter_tp, total) == held}
                    for held in {heads_of(r, exporter_tp, total) for r in range(exporter_tp)}):  # fmt: skip
        counts = [reads.count(rank) for rank in holders]
        assert max(counts) - min(counts) <= 1


def test_equal_workers_read_rank_by_rank() -> None:
    plan = plan_sources(4, 4, 8)
    assert [[source.exporter_rank for source in sources] for sources in plan] == [[0], [1], [2], [3]]
