"""What a simulated worker says of itself to the proxy."""

from cluster import messages as wire
from cluster.host.proxy_line import Introduction
from cluster.simulated.engine.paged_engine import BlockCount
from cluster.simulated.settings import SimulatedSettings
from cluster.simulated.transfers.exports import Exports
from cluster.simulated.transfers.imports import LINK, Imports


def introduction(settings: SimulatedSettings, ranks: list[wire.RankAddress]) -> Introduction:
    """Who it is, and that it is simulated."""
    simulation = settings.simulation
    layout = {
        "engine": "simulated",
        "model": settings.model,
        "block_size": str(simulation.block_size),
        "kv_bytes_per_token": str(simulation.kv_bytes_per_token),
    }
    facts = wire.EngineFacts(
        model=settings.model,
        max_model_len=settings.max_model_len,
        block_size=simulation.block_size,
        num_blocks=simulation.num_blocks,
        max_num_seqs=simulation.max_num_seqs,
        max_num_batched_tokens=simulation.max_num_batched_tokens,
        tensor_parallel_size=1,
        dtype="simulated",
        supported_tasks=["generate"],
        prefix_events=settings.prefix_events,
        simulated=True,
        can_sleep=True,
    )
    return Introduction(engine=facts, ranks=ranks, fingerprint=" ".join(layout.values()), layout_fields=layout)


def load(
    worker_id: str,
    epoch: str,
    requests: tuple[int, int],
    blocks: BlockCount,
    exports: Exports,
    imports: Imports,
    bad_frames: int,
    tokens_computed: int,
    *,
    asleep: bool = False,
) -> wire.WorkerLoad:
    """What it carries. `requests`: running and waiting."""
    leases = exports.leases
    return wire.WorkerLoad(
        worker_id=worker_id,
        epoch=epoch,
        num_running=requests[0],
        num_waiting=requests[1],
        blocks_total=blocks.total,
        blocks_free=blocks.free,
        blocks_used=blocks.used,
        blocks_leased=blocks.leased,
        exports_open=sum(leases.values()),
        imports_open=len(imports),
        bytes_in={LINK: imports.bytes_in} if imports.bytes_in else {},
        copy_s={LINK: imports.copy_s} if imports.bytes_in else {},
        transfer_failures=dict(imports.failures + exports.failures),
        bad_frames=bad_frames,
        peers={},
        bytes_out={LINK: exports.bytes_out} if exports.bytes_out else {},
        copy_out_s={LINK: exports.copy_out_s} if exports.bytes_out else {},
        leases=leases,
        tokens_computed=tokens_computed,
        asleep=asleep,
    )
