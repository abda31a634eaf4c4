"""Which KV heads a rank holds, and which exporter's ranks an importer's rank reads them from.

As in vLLM: with more heads than ranks each rank holds an equal share of consecutive heads; with more ranks than heads
each head is held by as many consecutive ranks (a cache with one head, as of MLA, is held by all of them).
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache


class UnevenHeads(ValueError):
    """Heads that cannot be dealt out to so many ranks."""


@dataclass(frozen=True)
class HeadRange:
    """Heads `first` to `first + count - 1` of the model."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def shared_with(self, other: "HeadRange") -> "HeadRange":
        """The heads of both; `count` is 0 if there are none."""
        first = max(self.first, other.first)
        return HeadRange(first, max(0, min(self.end, other.end) - first))


@dataclass(frozen=True)
class Source:
    """A rank of the exporter that one rank of the importer attaches to."""

    exporter_rank: int
    exporter_tp: int
    num_heads: int
    """Heads read there. 0: nothing; the attach only tells that rank that nobody needs its copy of the heads."""
    importers_expected: int
    """Ranks of the importer that attach to that rank in all."""


ONLY_SOURCE = Source(exporter_rank=0, exporter_tp=1, num_heads=1, importers_expected=1)
"""Both sides are one rank."""


def heads_of(rank: int, tp_size: int, total_heads: int) -> HeadRange:
    """The heads that a rank holds. Raises UnevenHeads."""
    if tp_size < 1 or total_heads < 1 or not 0 <= rank < tp_size:
        raise UnevenHeads(f"rank {rank} of {tp_size} with {total_heads} KV heads is no rank")
    if total_heads % tp_size and tp_size % total_heads:
        raise UnevenHeads(f"{total_heads} KV heads cannot be shared out evenly to {tp_size} ranks")
    count = max(1, total_heads // tp_size)
    return HeadRange(rank * total_heads // tp_size, count)


@lru_cache(maxsize=64)
def plan_sources(exporter_tp: int, importer_tp: int, total_heads: int) -> tuple[tuple[Source, ...], ...]:
    """Per rank of the importer, the exporter's ranks it attaches to, those it reads from first.

    Every rank of the exporter is attached to by at least one rank of the importer, so that each learns when its blocks
    are not needed any more; holders of the same heads are read from in turn. Both sides come to the same plan. Raises
    UnevenHeads.
    """
    holders: dict[HeadRange, list[int]] = {}
    for rank in range(exporter_tp):
        holders.setdefault(heads_of(rank, exporter_tp, total_heads), []).append(rank)
    num_readers: Counter[HeadRange] = Counter()
    plan: list[list[Source]] = []
    for importer_rank in range(importer_tp):
        wanted = heads_of(importer_rank, importer_tp, total_heads)
        sources = []
        for held, ranks in holders.items():
            if num_heads := held.shared_with(wanted).count:
                sources.append(Source(ranks[num_readers[held] % len(ranks)], exporter_tp, num_heads, 0))
                num_readers[held] += 1
        plan.append(sources)
    read = {source.exporter_rank for sources in plan for source in sources}
    for rank in set(range(exporter_tp)) - read:
        plan[rank % importer_tp].append(Source(rank, exporter_tp, 0, 0))
    expected = Counter(source.exporter_rank for sources in plan for source in sources)
    return tuple(
        tuple(replace(source, importers_expected=expected[source.exporter_rank]) for source in sources)
        for sources in plan
    )
