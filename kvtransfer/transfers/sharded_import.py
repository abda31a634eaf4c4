"""One import as the engine and the proxy see it, made of a shard for each rank of the exporter it comes from. No I/O.

A shard is an `Import`: it attaches, fetches and releases by itself. What one of them learns that concerns all, the
first token or a failure, the others are told; the whole closes once, when every shard would.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from kvtransfer.layout import CacheLayout
from kvtransfer.resharding.heads import Source, UnevenHeads, plan_sources
from kvtransfer.transfers.imports import ClosedImport, Import

_WORST_FIRST = ("cancelled", "recompute", "loaded")


def sources_of(layout: CacheLayout, rank: int, exporters: Sequence[Hashable]) -> tuple[Source, ...]:
    """Which of an exporter's ranks this rank attaches to. Raises UnevenHeads where they make no worker that fits."""
    if len(set(exporters)) < len(exporters):
        raise UnevenHeads("two ranks of the exporter have one address")
    if layout.form is not None:
        return plan_sources(len(exporters), layout.form.tp_size, layout.form.total_kv_heads)[rank]
    tp_size = layout.facts.tp_size
    if len(exporters) != tp_size:
        raise UnevenHeads(
            f"the exporter has {len(exporters)} ranks and this worker {tp_size}, and its caches cannot be cut by heads"
        )
    return (Source(rank % tp_size, tp_size, 1, 1),)


class ShardedImport:
    """`shards`: one per rank of the exporter, those that bring bytes first."""

    def __init__(self, shards: Sequence[Import]) -> None:
        self.shards = tuple(shards)

    def share_news(self, told: Import) -> list[Import]:
        """Pass on what `told` has just learned. Returns the other shards that this changed."""
        changed = []
        for other in self.shards:
            if other is told:
                continue
            knew = other.first_token
            if told.first_token is not None and knew is None:
                other.give_first_token(told.first_token)
            fails = told.failure is not None and not other.is_over
            if told.failure is not None and fails:
                # The prompt is computed again from the first bad block on; what is missing need not come any more.
                other.fail(*told.failure)
            if fails or other.first_token != knew:
                changed.append(other)
        return changed

    def closing(self) -> ClosedImport | None:
        """How it ended, or None while some shard has not."""
        closings = []
        for shard in self.shards:
            if (closing := shard.closing()) is None:
                return None
            closings.append(closing)
        return merged(closings)


def merged(closings: Sequence[ClosedImport]) -> ClosedImport:
    """The end of an import from the ends of its shards."""
    if len(closings) == 1:
        return closings[0]
    by_outcome = sorted(closings, key=lambda closing: _WORST_FIRST.index(closing.outcome))
    tokens = [closing.first_token for closing in closings if closing.first_token is not None]
    return replace(
        by_outcome[0],
        first_token=tokens[0] if tokens else None,
        bad_block_ids=list(dict.fromkeys(block for closing in closings for block in closing.bad_block_ids)),
        link=next((closing.link for closing in closings if closing.bytes_moved), closings[0].link),
        bytes_moved=sum(closing.bytes_moved for closing in closings),
        attached_to_done_s=max(closing.attached_to_done_s for closing in closings),
        done_to_loaded_s=max(closing.done_to_loaded_s for closing in closings),
        copy_s=sum(closing.copy_s for closing in closings),
        bytes_left_at_done=sum(closing.bytes_left_at_done for closing in closings),
    )
