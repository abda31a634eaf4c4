"""Which blocks are copied in which transfer. Pure."""

import random
from collections.abc import Sequence

from lab.links.messages import Transfer

_SEED = 23


def scattered(num_blocks: int, concurrent: int, name: str) -> list[Transfer]:
    """Every block once, in as many equal transfers; block ids in no order, as in a cache that has been in use."""
    generator = random.Random(_SEED)
    source_ids, target_ids = list(range(num_blocks)), list(range(num_blocks))
    generator.shuffle(source_ids)
    generator.shuffle(target_ids)
    share = num_blocks // concurrent
    return [
        Transfer(f"{name}-{part}", source_ids[part * share :][:share], target_ids[part * share :][:share])
        for part in range(concurrent)
    ]


def in_place(num_blocks: int, name: str) -> Transfer:
    """Every block to the one of the same number: what a contiguous copy does."""
    return Transfer(name, list(range(num_blocks)), list(range(num_blocks)))


def large_and_small(num_blocks: int, num_large: int, num_small: int, name: str) -> tuple[Transfer, list[Transfer]]:
    """A transfer of `num_large` blocks, and others of one block each, which the large one does not use.

    The large one names each of its blocks as often as it takes, so it can be larger than the cache.
    """
    (once,) = scattered(num_blocks - 1, 1, "")
    large = Transfer(f"{name}-large", _repeated(once.source_ids, num_large), _repeated(once.target_ids, num_large))
    last = num_blocks - 1
    return large, [Transfer(f"{name}-small-{number}", [last], [last]) for number in range(num_small)]


def _repeated(block_ids: Sequence[int], count: int) -> list[int]:
    return [block_ids[index % len(block_ids)] for index in range(count)]
