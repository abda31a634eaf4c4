from lab.links.work import in_place, large_and_small, scattered


def test_transfers_share_out_every_block_once_and_in_no_order() -> None:
    (alone,) = scattered(24, 1, "a")
    assert sorted(alone.source_ids) == sorted(alone.target_ids) == list(range(24))
    assert alone.source_ids != sorted(alone.source_ids)
    assert alone.source_ids != alone.target_ids
    parts = scattered(24, 8, "a")
    assert len({part.name for part in parts}) == 8
    assert [block for part in parts for block in part.source_ids] == alone.source_ids
    assert [block for part in parts for block in part.target_ids] == alone.target_ids


def test_a_contiguous_copy_keeps_every_block_in_its_place() -> None:
    assert in_place(3, "a").source_ids == in_place(3, "a").target_ids == [0, 1, 2]


def test_a_large_transfer_may_exceed_the_cache_but_never_writes_two_blocks_into_one() -> None:
    large, small = large_and_small(8, 100, 3, "a")
    assert len(large.source_ids) == len(large.target_ids) == 100
    pairs = set(zip(large.source_ids, large.target_ids, strict=True))
    assert len(pairs) == len({target for _, target in pairs}) == 7
    assert [(one.source_ids, one.target_ids) for one in small] == [([7], [7])] * 3
    assert 7 not in large.target_ids
