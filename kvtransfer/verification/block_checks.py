"""Which blocks of an import are compared with the exporter's, and what that says about the others. Pure.

`off` compares none and trusts all. `all` compares every block. `sample` compares one block of eight, from an offset
that the transfer's id decides, and the last one; when one of them differs, those before it are compared too, since all
that comes after the first bad block is computed again anyway.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

VerifyMode = Literal["off", "sample", "all"]
VERIFY_MODES: tuple[str, ...] = get_args(VerifyMode)
SAMPLE_EVERY = 8


@dataclass(frozen=True)
class Difference:
    """Of one block."""

    index: int
    theirs: int
    ours: int


@dataclass(frozen=True)
class Comparison:
    """Blocks to compare, in token order: their indexes among the copied ones, and their ids on both sides."""

    indexes: tuple[int, ...]
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def sampled(transfer_id: str, num_blocks: int) -> list[int]:
    """The same blocks wherever and whenever it is asked."""
    offset = zlib.crc32(transfer_id.encode()) % SAMPLE_EVERY
    return sorted({*range(offset, num_blocks, SAMPLE_EVERY), *range(num_blocks)[-1:]})


class BlockChecks:
    """Of one import. Blocks are known by their index among those that it copied; none is trusted until all is over."""

    def __init__(self, mode: str, transfer_id: str) -> None:
        self.first_bad: Difference | None = None
        self._mode = mode
        self._transfer_id = transfer_id
        self._has_begun = False
        self._wanted: deque[int] = deque()
        self._num_under_way = 0
        self._good: set[int] = set()

    def begin(self, num_blocks: int) -> None:
        """All of them are here. Later calls change nothing."""
        if not self._has_begun:
            self._has_begun = True
            if self._mode == "all":
                self._wanted.extend(range(num_blocks))
            elif self._mode == "sample":
                self._wanted.extend(sampled(self._transfer_id, num_blocks))

    @property
    def is_wanted(self) -> bool:
        """Some block is to be compared next; one comparison at a time."""
        return bool(self._wanted) and not self._num_under_way

    @property
    def is_over(self) -> bool:
        """What can be known is known: all is well, or `first_bad` is the first bad block."""
        return self._has_begun and not self._wanted and not self._num_under_way

    def next(self, max_blocks: int) -> list[int]:
        """What to compare next, in token order."""
        indexes = [self._wanted.popleft() for _ in range(min(max_blocks, len(self._wanted)))]
        self._num_under_way = len(indexes)
        return indexes

    def compared(self, indexes: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> None:
        """The checksums of the blocks that `next` told."""
        self._num_under_way = 0
        for index, their, our in zip(indexes, theirs, ours, strict=True):
            if their == our:
                self._good.add(index)
            elif self.first_bad is None or index < self.first_bad.index:
                self.first_bad = Difference(index, their, our)
        if self.first_bad:
            self._wanted = deque(index for index in range(self.first_bad.index) if index not in self._good)

    def is_good(self, index: int) -> bool:
        """It may be used, as far as checksums go."""
        if self._mode == "off" or (self.is_over and self.first_bad is None):
            return True
        return index in self._good and (self.first_bad is None or index < self.first_bad.index)
