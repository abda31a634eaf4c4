"""The names under which workers know the blocks of a prompt. Pure."""

import struct
from collections.abc import Iterator, Sequence

from cluster.prefix_events.block_hashes import NO_PARENT, block_hash


class PromptHashes:
    """The block hashes of one prompt, computed as far as somebody asks and then remembered.

    Walking stops at the first block that nobody holds, so a prompt that is new costs one hash. All of 128,000 tokens
    in blocks of 16 take about 12 ms.

    Args:
        token_ids: the prompt; must not change. The block with its last token is left out, because an engine computes
            that token always.
        parent: where the chain begins (`cluster.prefix_events.block_hashes.root`).
    """

    __slots__ = ("_parent", "_remembered", "_token_ids")

    def __init__(self, token_ids: Sequence[int] = (), parent: int = NO_PARENT) -> None:
        self._token_ids = token_ids
        self._parent = parent
        self._remembered: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        """False: no cache can hold anything of it."""
        return len(self._token_ids) > 1

    def of_size(self, block_size: int) -> Iterator[int]:
        """Hashes of its blocks of so many tokens, from the first on."""
        remembered = self._remembered.setdefault(block_size, [])
        num_blocks = (len(self._token_ids) - 1) // block_size
        for index in range(num_blocks):
            if index == len(remembered):
                parent = remembered[-1] if remembered else self._parent
                start = index * block_size
                try:
                    remembered.append(block_hash(parent, self._token_ids[start : start + block_size]))
                except struct.error:
                    return  # no engine caches what is no token
            yield remembered[index]


NO_HASHES = PromptHashes()
"""Of a request that caches cannot help, or for which that cannot be known."""
