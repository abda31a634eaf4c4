"""Builds the answer of `GET /twinpool/status`."""

import time
from collections.abc import Mapping, Sequence

from cluster.status import ApiServerStatus, BlockCounts, ClassStatus, ClusterStatus, LaunchNote, WorkerStatus
from proxy.dispatch.dispatcher import Dispatcher
from proxy.workers.administration import Administration
from proxy.workers.roster import Worker, role_named_in
from proxy.workers.worker_pool import WorkerPool

NOTHING_TO_SAY = LaunchNote(False, "", 0)


def report(
    model: str,
    pool: WorkerPool,
    dispatcher: Dispatcher,
    administration: Administration,
    api_servers: Sequence[ApiServerStatus] = (),
    sleep: str = "awake",
) -> ClusterStatus:
    """The cluster as the proxy sees it now."""
    roster = pool.roster
    causes, notes = roster.causes, administration.notes()
    removed = administration.leaving  # they are shown as long as they have something to finish
    known = [
        _worker(
            worker,
            causes.get(worker.worker_id, ""),
            notes.get(worker.worker_id, NOTHING_TO_SAY),
            pool.prefixes.state(worker),
        )
        for worker in sorted(roster.workers.values(), key=lambda w: w.index)
        if worker.alive or worker.worker_id not in removed
    ]
    missing = [
        _missing(worker_id, causes, notes.get(worker_id, NOTHING_TO_SAY))
        for worker_id in roster.expected
        if worker_id not in roster.workers and worker_id not in removed
    ]
    waiting = dispatcher.num_waiting
    return ClusterStatus(
        model=model,
        requests_running=len(dispatcher.trips) - waiting,
        requests_waiting=waiting,
        workers=[*known, *missing],
        links=dispatcher.recent.links(),
        transfers=dict(dispatcher.recent.outcomes),
        transfer_failures=dict(dispatcher.recent.failures),
        last_request=dispatcher.recent.last,
        refused_pairs=roster.refused_pairs(),
        classes=[
            ClassStatus(slo.name, slo.ttft_s, slo.itl_s, {str(outcome): count for outcome, count in outcomes.items()})
            for slo, outcomes in sorted(dispatcher.outcomes.items(), key=lambda item: item[0].name)
        ],
        rolling_restart=administration.rolling,
        autoscale=administration.steering.status if administration.steering is not None else None,
        api_servers=list(api_servers),
        adapters=pool.adapters.statuses(),
        connections_refused=pool.refused,
        sleep=sleep,
    )


def _missing(worker_id: str, causes: Mapping[str, str], note: LaunchNote) -> WorkerStatus:
    """A worker that has never said hello."""
    return WorkerStatus(
        worker_id=worker_id,
        role=role_named_in(worker_id),
        state="dead" if worker_id in causes and not note.starting else "starting",
        cause=causes.get(worker_id, ""),
        note=note.text,
        starts=note.starts,
    )


def _state(worker: Worker, note: LaunchNote) -> str:
    if worker.alive and worker.load is not None and worker.load.asleep:
        return "asleep"
    if worker.alive:
        return "ready" if worker.takes_requests else "draining"
    if note.starting:
        return "starting"
    return "drained" if worker.lost_by == "drained" else "dead"


def _worker(worker: Worker, cause: str, note: LaunchNote, prefix_events: str) -> WorkerStatus:
    load = worker.load
    return WorkerStatus(
        worker_id=worker.worker_id,
        role=worker.role,
        state=_state(worker, note),
        cause="" if worker.alive else cause,
        note="" if worker.alive else note.text,
        starts=note.starts,
        drains_to=worker.drains_to if worker.alive else "",
        epoch=worker.hello.epoch,
        pid=worker.hello.pid,
        hostname=worker.hello.hostname,
        running=load.num_running if load is not None else 0,
        waiting=load.num_waiting if load is not None else 0,
        blocks=BlockCounts(load.blocks_total, load.blocks_free, load.blocks_used, load.blocks_leased)
        if load is not None
        else BlockCounts(),
        exports_open=load.exports_open if load is not None else 0,
        imports_open=load.imports_open if load is not None else 0,
        leases=load.leases if load is not None else {},
        transfer_failures=load.transfer_failures if load is not None else {},
        heard_ago_s=max(0.0, time.monotonic() - worker.heard_s),
        peers=load.peers if load is not None else {},
        prefix_events=prefix_events,
        simulated=worker.hello.engine.simulated,
    )
