"""Which blocks one engine's prefix cache holds, under our own hashes. Pure.

vLLM may hold several copies of a block and says of each that it is stored and removed, so copies are counted. After
missed events what is held is not known: the entries made from then on are right, but others may be missing, until the
cache is cleared.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.prefix_events.block_hashes import NO_PARENT, block_hash, root, salted
from cluster.prefix_events.engine_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, EngineHash

_MEDIUM = "GPU"
"""vLLM's name of the cache that the engine computes with, on CPUs too."""
_WHOLE_PREFIX_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Caches whose blocks are found from the first one on. A sliding window finds its last ones."""


@dataclass(frozen=True, slots=True)
class CacheNews:
    """What changed since it was last asked for. No block is in both lists."""

    cleared: bool
    """First of all: nothing is held of what was said before."""
    removed: list[int]
    stored: list[int]
    known: bool
    """False: events were missed, more blocks may be held."""


class CachedBlocks:
    """One engine, from its start on.

    Args:
        block_size: tokens per block, as the engine reports it.
        max_blocks: the engine cannot hold more.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._ours: dict[EngineHash, int] = {}
        self._copies: dict[EngineHash, int] = {}
        """Only of blocks with more than one."""
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._cleared = False
        self._told_known = True
        self._unsupported = False
        self.known = True
        """False: events were missed, so blocks may be held that are not listed."""
        self.oddities: Counter[str] = Counter()
        """What else was noticed, by kind; the reader takes it away."""

    def __len__(self) -> int:
        return len(self._ours)

    def all_blocks(self) -> list[int]:
        """Our hashes of everything held."""
        return list(self._ours.values())

    @property
    def has_news(self) -> bool:
        """`take_news` would tell something."""
        return bool(self._cleared or self._stored or self._removed or self.known != self._told_known)

    def take_news(self) -> CacheNews:
        """The net change since the last call."""
        news = CacheNews(self._cleared, list(self._removed), list(self._stored), self.known)
        self._cleared, self._stored, self._removed, self._told_known = False, set(), set(), self.known
        return news

    def apply(self, events: Iterable[EngineEvent]) -> None:
        """Takes the events of a step."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.clear()
                case BlockStored() | BlockRemoved() if event.medium not in (None, _MEDIUM):
                    self.oddities["other_tier"] += 1
                case BlockRemoved():
                    for engine_hash in event.block_hashes:
                        self.drop(engine_hash)
                case BlockStored():
                    self._store(event)

    def hold(self, engine_hash: EngineHash, ours: int) -> bool:
        """One copy more of a block; False if the engine cannot hold so many, which makes everything unknown."""
        if engine_hash in self._ours:
            self._copies[engine_hash] = self._copies.get(engine_hash, 1) + 1
            return True
        if len(self._ours) >= self._max_blocks:
            # Removals must have been lost.
            self.miss()
            return False
        self._ours[engine_hash] = ours
        if ours in self._removed:
            self._removed.discard(ours)
        else:
            self._stored.add(ours)
        return True

    def drop(self, engine_hash: EngineHash) -> None:
        """One copy less."""
        copies = self._copies.pop(engine_hash, 1)
        if copies > 2:
            self._copies[engine_hash] = copies - 1
        if copies > 1:
            return
        ours = self._ours.pop(engine_hash, None)
        if ours is None:
            return  # stored before events were missed, or an orphan
        if ours in self._stored:
            self._stored.discard(ours)
        else:
            self._removed.add(ours)

    def clear(self) -> None:
        """Nothing is held, for certain."""
        self._forget_all()
        self.known = not self._unsupported

    def miss(self) -> None:
        """Events are lost: what was listed may be gone, and what is held may not be listed."""
        self.oddities["missed"] += 1
        self._forget_all()
        self.known = False

    def _forget_all(self) -> None:
        self._ours.clear()
        self._copies.clear()
        self._stored.clear()
        self._removed.clear()
        self._cleared = True

    def _store(self, event: BlockStored) -> None:
        if not self._is_supported(event):
            self._unsupported = True
            self.miss()
        if self._unsupported:
            return
        keys = event.extra_keys or [None] * len(event.block_hashes)
        parent = self._parent(event, keys)
        if parent is None:
            # Its parent came before events were missed, or was dropped by the engine as damaged.
            self.oddities["orphaned"] += len(event.block_hashes)
            return
        for index, engine_hash in enumerate(event.block_hashes):
            others = _other_keys(event, keys, index)
            if others:
                parent = salted(parent, "content", others)
            start = index * self._block_size
            try:
                parent = block_hash(parent, event.token_ids[start : start + self._block_size])
            except struct.error:
                self.oddities["malformed"] += 1
                self.miss()
                return
            if not self.hold(engine_hash, parent):
                return

    def _is_supported(self, event: BlockStored) -> bool:
        num_blocks = len(event.block_hashes)
        return (
            event.block_size == self._block_size
            and event.group_idx in (None, 0)
            and event.kv_cache_spec_kind in _WHOLE_PREFIX_KINDS
            and len(event.token_ids) == num_blocks * self._block_size
            and (event.extra_keys is None or len(event.extra_keys) == num_blocks)
        )

    def _parent(self, event: BlockStored, keys: Sequence[list[Any] | None]) -> int | None:
        if event.parent_block_hash is not None:
            return self._ours.get(event.parent_block_hash)
        if not event.lora_id and not any(keys):
            return NO_PARENT
        return root(event.lora_id or 0, _cache_salt(event, keys))


def _own_keys(event: BlockStored, keys: list[Any] | None) -> list[Any]:
    """What a block's hash depends on besides tokens and the LoRA, which the root of the chain stands for."""
    own = list(keys or ())
    if event.lora_name and own and own[0] == event.lora_name:
        del own[0]
    return own


def _cache_salt(event: BlockStored, keys: Sequence[list[Any] | None]) -> str:
    own = _own_keys(event, keys[0]) if keys else []
    return own[0] if len(own) == 1 and isinstance(own[0], str) else ""


def _other_keys(event: BlockStored, keys: Sequence[list[Any] | None], index: int) -> list[Any]:
    """Images and embeddings, which no prompt is compared by."""
    if not keys[index]:
        return []
    is_first = index == 0 and event.parent_block_hash is None
    if is_first and _cache_salt(event, keys):
        return []
    return _own_keys(event, keys[index])
