"""The KV blocks of a simulated worker: who holds which, and which are known again. Pure.

As in vLLM a block that nobody holds is free and keeps its content until it is needed for another; of two free blocks
the one that was given back first is needed first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cluster.prefix_events.block_hashes import block_hash
from cluster.prefix_events.cached_blocks import CachedBlocks


def block_hashes(tokens: Sequence[int], block_size: int, root: int, known: Sequence[int] = ()) -> list[int]:
    """One hash per full block of `tokens`, each of everything up to its end; `known` are the first of them.

    The proxy computes the same of a prompt, see `cluster.prefix_events`, also for `root`.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end])
        hashes.append(parent)
    return hashes


class BlockPool:
    """Blocks by id, from 0 on. What becomes known and what is forgotten is noted in `noted`."""

    def __init__(self, num_blocks: int, noted: CachedBlocks) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, int] = {}
        self._by_hash: dict[int, int] = {}
        self._noted = noted

    @property
    def num_free(self) -> int:
        return len(self._free)

    def cached(self, hashes: Iterable[int]) -> list[int]:
        """The blocks of the longest prefix that is known."""
        found = []
        for known_as in hashes:
            block = self._by_hash.get(known_as)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, cached: Sequence[int], num_new: int) -> list[int] | None:
        """Holds known blocks once more and takes free ones; None, and nothing changed, if there are too few."""
        num_revived = sum(1 for block in cached if not self._holders[block])
        if num_new + num_revived > len(self._free):
            return None
        for block in cached:
            self._free.pop(block, None)
            self._holders[block] += 1
        table = list(cached)
        for _ in range(num_new):
            block, _none = self._free.popitem(last=False)
            known_as = self._hash_of.pop(block, None)
            if known_as is not None:
                del self._by_hash[known_as]
                self._noted.drop(known_as)
            self._holders[block] = 1
            table.append(block)
        return table

    def give_back(self, table: Sequence[int]) -> None:
        """One holder less for each; the end of a prompt is forgotten before its beginning."""
        for block in reversed(table):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def name(self, block: int, known_as: int) -> None:
        """The block is full with what the hash says."""
        if block not in self._hash_of and known_as not in self._by_hash:
            self._hash_of[block] = known_as
            self._by_hash[known_as] = block
            self._noted.hold(known_as, known_as)

    def forget_all(self) -> bool:
        """Nothing is known any more; as in vLLM only while nobody holds a block."""
        if self.num_free < self.num_blocks:
            return False
        self._hash_of.clear()
        self._by_hash.clear()
        self._noted.clear()
        return True
