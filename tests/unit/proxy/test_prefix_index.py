"""Who holds which beginning of a prompt."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.prefix_events.block_hashes import root
from proxy.scheduling.prefix_index import PrefixIndex
from proxy.scheduling.prompt_hashes import NO_HASHES, PromptHashes

WORKERS = {"prefill-0": 2, "prefill-1": 2, "decode-0": 4, "decode-1": 2}
"""Their block sizes."""


def blocks(prompt: list[int], block_size: int) -> list[int]:
    """All whole blocks of a text, as a worker that computed it would tell."""
    return list(PromptHashes([*prompt, 0]).of_size(block_size))


def index_of(**texts: list[list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for name, held in texts.items():
        worker_id = name.replace("_", "-")
        index.known(worker_id, WORKERS[worker_id])
        for text in held:
            index.stored(worker_id, blocks(text, WORKERS[worker_id]))
    return index


def test_each_worker_is_told_with_the_longest_beginning_it_holds() -> None:
    index = index_of(
        prefill_0=[[1, 2, 3, 4, 5, 6]], prefill_1=[[1, 2, 3, 9]], decode_0=[[1, 2, 3, 4]], decode_1=[[7, 8]]
    )
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5, 6, 7])) == {"prefill-0": 6, "prefill-1": 2, "decode-0": 4}
    assert index.cached_tokens(PromptHashes([7, 8, 9])) == {"decode-1": 2}
    assert index.cached_tokens(NO_HASHES) == {}
    assert index.cached_tokens_of("prefill-1", PromptHashes([1, 2, 3, 4, 5])) == 2
    assert index.cached_tokens_of("nobody", PromptHashes([1, 2, 3])) == 0


def test_the_last_token_is_never_found_because_engines_compute_it() -> None:
    index = index_of(prefill_0=[[1, 2, 3, 4]])
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4])) == {"prefill-0": 2}


def test_a_block_whose_beginning_is_gone_helps_nobody() -> None:
    index = index_of(prefill_0=[[1, 2, 3, 4]])
    index.removed("prefill-0", blocks([1, 2], 2))
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5])) == {}


def test_prompts_of_another_lora_or_salt_are_others() -> None:
    index = index_of(prefill_0=[[1, 2, 3, 4]])
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5], root(7))) == {}
    index.stored("prefill-0", PromptHashes([1, 2, 3], root(7)).of_size(2))
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5], root(7))) == {"prefill-0": 2}


def test_a_worker_that_is_gone_or_cleared_leaves_nothing() -> None:
    index = index_of(prefill_0=[[1, 2, 3, 4]], prefill_1=[[1, 2]], decode_0=[[1, 2, 3, 4]])
    index.cleared("decode-0")
    assert index.is_known("decode-0")
    index.forget("prefill-0")
    assert not index.is_known("prefill-0")
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5])) == {"prefill-1": 2}
    index.forget("prefill-1")
    index.stored("prefill-1", [1, 2, 3])
    assert index.num_blocks == 0


def test_a_worker_that_came_back_with_other_blocks_starts_anew() -> None:
    index = index_of(prefill_0=[[1, 2, 3, 4]])
    index.known("prefill-0", 4)
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5])) == {}
    index.stored("prefill-0", blocks([1, 2, 3, 4], 4))
    assert index.cached_tokens(PromptHashes([1, 2, 3, 4, 5])) == {"prefill-0": 4}


def test_hashes_are_computed_only_as_far_as_somebody_holds_the_prompt() -> None:
    asked: list[int] = []

    class Tokens(list[int]):
        def __getitem__(self, at: Any) -> Any:
            asked.append(at.start)
            return super().__getitem__(at)

    prompt = PromptHashes(Tokens(range(101)))
    assert index_of().cached_tokens(prompt) == {}
    assert asked == []
    index = index_of(prefill_0=[[0, 1, 2, 3]])
    assert index.cached_tokens(prompt) == index.cached_tokens(prompt) == {"prefill-0": 4}
    assert asked == [0, 2, 4]


def test_numbers_that_are_no_tokens_are_in_no_cache() -> None:
    assert list(PromptHashes([1, 2, -1, 4, 5]).of_size(2)) == list(PromptHashes([1, 2, 3]).of_size(2))
    assert list(PromptHashes([1 << 40, 2, 3]).of_size(2)) == []


TEXT = st.lists(st.integers(0, 1), min_size=2, max_size=9)


@given(
    changes=st.lists(st.tuples(st.sampled_from([*WORKERS]), st.sampled_from(["store", "drop", "clear", "go"]), TEXT)),
    prompt=TEXT,
)
def test_the_index_agrees_with_comparing_tokens(changes: list[tuple[str, str, list[int]]], prompt: list[int]) -> None:
    index, held = PrefixIndex(), {worker_id: set[tuple[int, ...]]() for worker_id in WORKERS}
    for worker_id, change, text in changes:
        size = WORKERS[worker_id]
        index.known(worker_id, size)
        beginnings = {tuple(text[:end]) for end in range(size, len(text) + 1, size)}
        match change:
            case "store":
                index.stored(worker_id, blocks(text, size))
                held[worker_id] |= beginnings
            case "drop":
                index.removed(worker_id, blocks(text, size)[-1:])
                held[worker_id] -= {max(beginnings, key=len)} if beginnings else set()
            case "clear":
                index.cleared(worker_id)
                held[worker_id].clear()
            case "go":
                index.forget(worker_id)
                held[worker_id].clear()
    expected = {}
    for worker_id, size in WORKERS.items():
        end = 0
        while end + size < len(prompt) and tuple(prompt[: end + size]) in held[worker_id]:
            end += size
        if end:
            expected[worker_id] = end
    assert index.cached_tokens(PromptHashes(prompt)) == expected
    assert {w: n for w in WORKERS if (n := index.cached_tokens_of(w, PromptHashes(prompt)))} == expected
    assert index.num_blocks == sum(
        len(set[tuple[int, ...]]().union(*(held[w] for w in WORKERS if WORKERS[w] == size))) for size in (2, 4)
    )
