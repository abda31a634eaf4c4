"""Waiting for the workers of a cluster that starts."""

import time
from collections.abc import Callable

from cluster.config import ROLES, ClusterConfig
from proxy.supervision import ProxyStartError
from proxy.workers.roster import Roster, role_named_in
from proxy.workers.worker_pool import WorkerPool


def expected_workers(config: ClusterConfig) -> tuple[str, ...]:
    """Ids of all workers of the configuration, in the order of their indices."""
    return tuple(f"{role}-{index}" for role in ROLES for index in range(config.pools.of(role).replicas))


async def wait_for_workers(
    pool: WorkerPool, timeout_s: float, on_join: Callable[[str], None] = lambda _worker_id: None
) -> bool:
    """Returns when a prefill and a decode worker that can exchange blocks are there; raises `ProxyStartError`.

    A cluster without prefill workers in its configuration only waits for a decode worker.
    """
    deadline_s = time.monotonic() + timeout_s
    roster = pool.roster
    joined: set[str] = set()
    while True:
        for worker_id in sorted(roster.workers.keys() - joined):
            joined.add(worker_id)
            on_join(worker_id)
        if roster.has_pair() if roster.expects_prefill else roster.alive("decode"):
            return True
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or _hopeless(roster):
            raise ProxyStartError(_who_is_missing(roster, timeout_s))
        await pool.wait_for_change(min(left_s, 1.0))


def _hopeless(roster: Roster) -> bool:
    """All workers of a role are dead, or everybody has come and still no pair can exchange blocks."""
    if all(worker_id in roster.workers or worker_id in roster.causes for worker_id in roster.expected):
        return True
    by_role: dict[str, list[str]] = {}
    for worker_id in roster.expected:
        by_role.setdefault(role_named_in(worker_id), []).append(worker_id)
    return any(all(worker_id in roster.causes for worker_id in pool) for pool in by_role.values())


def _who_is_missing(roster: Roster, timeout_s: float) -> str:
    refused = roster.refused_pairs()
    if refused and not roster.has_pair():
        return (
            "no prefill worker has a KV layout that fits a decode worker, so nothing could be handed over; they differ "
            f"in (prefill / decode): {', '.join(refused[0].differing_fields)}. Give both pools the same engine options"
        )
    missing = [worker_id for worker_id in roster.expected if worker_id not in roster.workers]
    dead = [f"{worker_id}: {cause}" for worker_id, cause in roster.causes.items()]
    late = [worker_id for worker_id in missing if worker_id not in roster.causes]
    parts = []
    if dead:
        parts.append("; ".join(dead))
    if late:
        parts.append(f"{', '.join(late)} did not come up within {timeout_s:g} s (start_timeout_s); see their logs")
    return "the cluster did not start: " + ("; ".join(parts) or "no worker came up; see their logs")
