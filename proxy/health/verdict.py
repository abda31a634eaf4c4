"""What is wrong with the cluster, as sentences. Pure."""

from collections.abc import Sequence

from proxy.health.progress import Stall


def cluster_faults(num_decode: int, stalls: Sequence[Stall], stalled_after_s: float) -> list[str]:
    """Why `/health` fails; empty: it does not. An idle cluster is healthy.

    `num_decode` are the decode workers that are alive or being started again.
    """
    faults = [] if num_decode else ["no decode worker is alive, so nobody generates tokens"]
    faults += [
        f"worker {stall.worker_id} has requests and no token or chunk came from it for {stall.for_s:.0f} s "
        f"(liveness.stalled_after_s={stalled_after_s:g})"
        for stall in stalls
    ]
    return faults
