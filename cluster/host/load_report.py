"""What a worker host reports about its load: its own counts and those of its ranks, added up."""

from typing import TypeVar

from cluster import messages as wire
from cluster.host.rank_channel import RankChannel
from kvtransfer.host_messages import PoolStats

Number = TypeVar("Number", int, float)


def worker_load(
    worker_id: str,
    epoch: str,
    channel: RankChannel,
    *,
    num_blocks: int,
    num_running: int,
    num_waiting: int,
    bad_frames: int,
    asleep: bool = False,
) -> wire.WorkerLoad:
    """`num_blocks` are the engine's, `bad_frames` those that the host dropped itself."""
    ranks = list(channel.stats.values())
    pool = channel.pool or _untouched(num_blocks)
    return wire.WorkerLoad(
        worker_id=worker_id,
        epoch=epoch,
        num_running=num_running,
        num_waiting=num_waiting,
        blocks_total=pool.total,
        blocks_free=pool.free,
        blocks_used=pool.used,
        blocks_leased=pool.leased,
        exports_open=max((rank.exports_open for rank in ranks), default=0),
        imports_open=max((rank.imports_open for rank in ranks), default=0),
        bytes_in=_sum_by_key([rank.bytes_in for rank in ranks]),
        copy_s=_sum_by_key([rank.copy_s for rank in ranks]),
        transfer_failures=_sum_by_key([rank.failures for rank in ranks]),
        bad_frames=bad_frames + channel.bad_frames + sum(rank.bad_frames for rank in ranks),
        peers={address: link for rank in ranks for address, link in rank.peers.items()},
        bytes_out=_sum_by_key([rank.bytes_out for rank in ranks]),
        copy_out_s=_sum_by_key([rank.copy_out_s for rank in ranks]),
        leases=_sum_by_key([rank.leases for rank in ranks]),
        tokens_computed=pool.tokens_computed,
        refused=_sum_by_key([*(rank.refused for rank in ranks), channel.refused]),
        copies_in=_sum_by_key([rank.copies_in for rank in ranks]),
        asleep=asleep,
    )


def transfers_open(channel: RankChannel) -> int:
    """Exports and imports that some rank has not closed."""
    return sum(rank.exports_open + rank.imports_open for rank in channel.stats.values())


def _untouched(num_blocks: int) -> PoolStats:
    """The pool of an engine that has not made a step. One block is vLLM's own (the null block)."""
    total = max(0, num_blocks - 1)
    return PoolStats(total=total, free=total, used=0, leased=0)


def _sum_by_key(counts: list[dict[str, Number]]) -> dict[str, Number]:
    keys = {key for count in counts for key in count}
    return {key: sum(count[key] for count in counts if key in count) for key in sorted(keys)}
