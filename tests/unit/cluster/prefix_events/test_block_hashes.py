from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.prefix_events.block_hashes import HASH_BITS, NO_PARENT, block_hash, root, salted

TOKENS = st.lists(st.integers(0, (1 << 31) - 1), min_size=4, max_size=4)


def test_workers_and_proxies_of_all_machines_compute_the_same() -> None:
    first = block_hash(NO_PARENT, [1, 2, 3, 4])
    assert (first, block_hash(first, [5, 6, 7, 8])) == (0x9222804E3E39BA, 0xF5E021CC935C436)


@settings(max_examples=20)
@given(parents=st.lists(TOKENS, min_size=2, max_size=2, unique_by=tuple), tokens=TOKENS)
def test_the_same_tokens_after_different_ones_are_different_blocks(parents: list[list[int]], tokens: list[int]) -> None:
    a, b = (block_hash(NO_PARENT, parent) for parent in parents)
    assert a != b
    assert block_hash(a, tokens) != block_hash(b, tokens)
    assert 0 <= block_hash(a, tokens) < 1 << HASH_BITS


def test_a_lora_and_a_salt_begin_chains_of_their_own() -> None:
    roots = [root(), root(1), root(0, "x"), root(1, "x"), root(11), salted(NO_PARENT, "content", ["x"])]
    assert all(a != b for a, b in pairwise(sorted(roots)))
    assert root() == NO_PARENT
