"""What an engine holds, from its events."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.prefix_events.block_hashes import NO_PARENT, block_hash, root
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.engine_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

BLOCK = 2


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> BlockStored:
    values = {"medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention", **more}
    return BlockStored(hashes, parent, tokens, BLOCK, **values)


def removed(*hashes: int, **more: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), **{"medium": "GPU", "group_idx": 0, **more})


def ours(*tokens: int, parent: int = NO_PARENT) -> list[int]:
    chain = []
    for start in range(0, len(tokens), BLOCK):
        parent = block_hash(parent, tokens[start : start + BLOCK])
        chain.append(parent)
    return chain


def after(*events: EngineEvent, max_blocks: int = 100) -> CachedBlocks:
    cached = CachedBlocks(BLOCK, max_blocks)
    cached.apply(events)
    return cached


def test_blocks_are_named_by_their_tokens_and_all_before_them() -> None:
    cached = after(stored([71, 72], [1, 2, 3, 4]), stored([73], [5, 6], parent=72))
    assert cached.all_blocks() == ours(1, 2, 3, 4, 5, 6)
    assert cached.known


def test_news_are_net_changes_and_told_once() -> None:
    cached = after(stored([71, 72], [1, 2, 3, 4]), removed(72))
    news = cached.take_news()
    assert (news.cleared, news.removed, news.stored, news.known) == (False, [], ours(1, 2), True)
    assert not cached.has_news
    cached.apply([removed(71), stored([71], [1, 2])])
    assert not cached.has_news
    cached.apply([removed(71)])
    assert cached.take_news().removed == ours(1, 2)


def test_a_block_with_two_copies_is_held_until_both_are_gone() -> None:
    cached = after(*[stored([71], [1, 2])] * 3, removed(71), removed(71))
    assert cached.all_blocks() == ours(1, 2)
    cached.apply([removed(71)])
    assert cached.all_blocks() == []


def test_a_cleared_cache_is_told_before_what_came_after() -> None:
    cached = after(stored([71], [1, 2]))
    cached.take_news()
    cached.apply([stored([72], [7, 8]), AllBlocksCleared(), stored([73], [3, 4])])
    news = cached.take_news()
    assert (news.cleared, news.removed, news.stored) == (True, [], ours(3, 4))


def test_after_missed_events_new_ones_count_but_the_cache_is_unknown_until_it_is_cleared() -> None:
    cached = after(stored([71], [1, 2]))
    cached.miss()
    cached.apply([removed(71), stored([72], [3, 4], parent=71), stored([73], [5, 6])])
    news = cached.take_news()
    assert (news.cleared, news.known, news.stored) == (True, False, ours(5, 6))
    assert cached.oddities == {"missed": 1, "orphaned": 1}
    cached.apply([AllBlocksCleared()])
    assert cached.take_news().known


def test_a_lora_and_a_cache_salt_are_part_of_the_name() -> None:
    lora = after(stored([71, 72], [1, 2, 3, 4], lora_name="poet", lora_id=7, extra_keys=[["poet"], ["poet"]]))
    assert lora.all_blocks() == ours(1, 2, 3, 4, parent=root(7))
    salt = after(stored([71, 72], [1, 2, 3, 4], extra_keys=[["poet"], None]))
    assert salt.all_blocks() == ours(1, 2, 3, 4, parent=root(0, "poet"))
    both = after(stored([71], [1, 2], lora_name="poet", lora_id=7, extra_keys=[["poet", "s"]]))
    both.apply([stored([72], [3, 4], parent=71, lora_name="poet", lora_id=7, extra_keys=[["poet"]])])
    assert both.all_blocks() == ours(1, 2, 3, 4, parent=root(7, "s"))


def test_blocks_with_images_match_no_text_and_neither_do_those_after_them() -> None:
    text = after(stored([71, 72, 73], [1, 2, 3, 4, 5, 6]))
    image = after(stored([81, 82, 83], [1, 2, 3, 4, 5, 6], extra_keys=[None, [["image", 0]], None]))
    assert image.all_blocks()[0] == text.all_blocks()[0]
    assert not set(image.all_blocks()[1:]) & set(text.all_blocks())


def test_another_tier_is_not_this_cache() -> None:
    cached = after(stored([71], [1, 2]), stored([72], [3, 4], medium="CPU"), removed(71, medium="CPU"))
    assert cached.all_blocks() == ours(1, 2)
    assert cached.oddities == {"other_tier": 2}


@pytest.mark.parametrize(
    "event",
    [
        stored([71], [1, 2], kv_cache_spec_kind="sliding_window"),
        stored([71], [1, 2], group_idx=1),
        stored([71], [1, 2, 3, 4]),
        stored([71], [1, 2], extra_keys=[None, None]),
        BlockStored([71], None, [1, 2, 3], 3, "GPU", None),
    ],
)
def test_a_cache_that_is_not_understood_is_unknown_for_ever(event: BlockStored) -> None:
    cached = after(stored([70], [1, 2]), event, AllBlocksCleared(), stored([72], [3, 4]))
    assert cached.all_blocks() == []
    assert not cached.known


def test_it_never_grows_beyond_the_engines_blocks() -> None:
    cached = after(*[stored([i], [i, i]) for i in range(3)], max_blocks=2)
    assert len(cached) == 0
    assert not cached.known


@settings(max_examples=50)
@given(st.data())
def test_whoever_follows_the_news_holds_what_the_engine_holds(data: st.DataObject) -> None:
    cached, told, copies = CachedBlocks(BLOCK, 50), set[int](), dict[int, int]()
    for _ in range(data.draw(st.integers(1, 25))):
        at = data.draw(st.integers(0, 6))
        match data.draw(st.sampled_from(["store", "store", "remove", "clear", "tell"])):
            case "store":
                copies[at] = copies.get(at, 0) + 1
                cached.apply([stored([at], [at, at])])
            case "remove":
                copies[at] = max(0, copies.get(at, 0) - 1)
                cached.apply([removed(at)])
            case "clear":
                copies.clear()
                cached.apply([AllBlocksCleared()])
            case "tell":
                news = cached.take_news()
                told = ((set() if news.cleared else told) - set(news.removed)) | set(news.stored)
                assert told == {ours(block, block)[0] for block, count in copies.items() if count}
    assert sorted(cached.all_blocks()) == sorted(ours(block, block)[0] for block, count in copies.items() if count)
