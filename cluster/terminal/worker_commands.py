"""`twinpool drain`, `role`, `restart` and `scale`: each gives an order and shows how far it is until it is done."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console

from cluster.orders import SCALE_PATH, Accepted, DrainOrder, RestartOrder, RoleOrder, ScaleOrder
from cluster.status import ClusterStatus, WorkerStatus
from cluster.terminal.server_calls import DEFAULT_URL, ApiKey, CallFailed, Url, fail, fetch_status, give_order

_LOOK_AGAIN_S = 0.3
_MARGIN_S = 10.0
"""For a cluster that is short of CPU, after the time that it gave itself."""

Worker = Annotated[str, typer.Argument(metavar="WORKER", help="Its id: prefill-0, decode-1.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Give the order and return at once.")]
Force = Annotated[bool, typer.Option("--force", help="Also if no decode worker is left meanwhile: requests wait.")]
TimeLimit = Annotated[
    float | None,
    typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Instead of drain_timeout_s of the configuration."),
]


@dataclass(frozen=True)
class Progress:
    """How far an order is."""

    text: str
    outcome: Literal["", "done", "failed"] = ""


def drain(
    worker: Worker,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    timeout_s: TimeLimit = None,
    force: Force = False,
    no_wait: NoWait = False,
) -> None:
    """Let a worker finish what it has and leave.

    It gets no new requests. SIGTERM to its process does the same.
    """
    order = DrainOrder(timeout_s, force)
    _carry_out(
        url, api_key, f"/twinpool/workers/{worker}/drain", order, no_wait, lambda status: drain_progress(status, worker)
    )


def role(
    worker: Worker,
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="What it is to serve as.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    timeout_s: TimeLimit = None,
    force: Force = False,
    no_wait: NoWait = False,
) -> None:
    """Let a worker finish what it has and serve in the other role.

    Its weights stay loaded, and its id stays its name.
    """
    order = RoleOrder(role, timeout_s, force)
    progress: Callable[[ClusterStatus], Progress] = lambda status: role_progress(status, worker, role)  # noqa: E731
    _carry_out(url, api_key, f"/twinpool/workers/{worker}/role", order, no_wait, progress)


def restart(
    workers: Annotated[
        str, typer.Argument(metavar="WORKER|prefill|decode|all", help="Which workers; or api-server-1.")
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    timeout_s: TimeLimit = None,
    force: Force = False,
    no_wait: NoWait = False,
) -> None:
    """Start workers again, one after another.

    Each finishes what it has first, and is back before the next one leaves. Also starts one that has left or died.
    """
    _carry_out(url, api_key, "/twinpool/restart", RestartOrder(workers, timeout_s, force), no_wait, restart_progress)


def scale(
    pool: Annotated[Literal["prefill", "decode"], typer.Argument(help="Which pool.")],
    replicas: Annotated[int, typer.Argument(min=0, max=1024, metavar="N", help="How many workers it is to have.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    timeout_s: TimeLimit = None,
    no_wait: NoWait = False,
) -> None:
    """Give a pool another number of workers.

    New ones are started where cores or GPUs are free. Those that are too many finish what they have and leave for good;
    the ones with least to do go first.
    """
    order = ScaleOrder(pool, replicas, timeout_s)
    _carry_out(url, api_key, SCALE_PATH, order, no_wait, lambda status: scale_progress(status, pool, replicas))


def scale_progress(status: ClusterStatus, pool: str, replicas: int) -> Progress:
    """How far a pool is from its new number of workers."""
    mine = [worker for worker in status.workers if worker.role == pool]
    ready = [worker for worker in mine if worker.state == "ready"]
    others = [worker for worker in mine if worker.state != "ready"]
    text = f"{len(ready)} of {replicas} {pool} workers are ready"
    if failed := [worker for worker in others if worker.state == "dead"]:
        why = "; ".join(f"{worker.worker_id}: {worker.cause}" for worker in failed)
        return Progress(f"{text}; {why}", "failed")
    if len(ready) == replicas and not others:
        return Progress(f"the {pool} pool has {replicas} workers", "done")
    doing = [_left(worker) if worker.state == "draining" else f"{worker.worker_id} {worker.state}" for worker in others]
    return Progress("; ".join([text, *doing]))


def drain_progress(status: ClusterStatus, worker_id: str) -> Progress:
    """How far a drain is."""
    worker = _find(status, worker_id)
    if worker is None:
        return Progress(f"{worker_id} is not known any more", "failed")
    match worker.state:
        case "draining":
            return Progress(_left(worker))
        case "drained":
            return Progress(worker.cause or f"{worker_id} left", "done")
        case "ready":
            return Progress(f"{worker_id} takes requests again", "failed")
        case _:
            return Progress(f"{worker_id} ended before it had finished: {worker.cause}", "failed")


def role_progress(status: ClusterStatus, worker_id: str, role: str) -> Progress:
    """How far a change of the role is."""
    worker = _find(status, worker_id)
    if worker is None:
        return Progress(f"{worker_id} is not known any more", "failed")
    match worker.state:
        case "draining":
            return Progress(_left(worker))
        case "ready" if worker.role == role:
            return Progress(f"{worker_id} serves as {role}", "done")
        case "ready":
            return Progress(f"{worker_id} serves as {worker.role}: somebody ordered that meanwhile", "failed")
        case _:
            return Progress(f"{worker_id} ended before it had finished: {worker.cause}", "failed")


def restart_progress(status: ClusterStatus) -> Progress:
    """How far the rolling restart is."""
    rolling = status.rolling_restart
    if rolling is None:
        return Progress("the cluster knows of no restart; was it started anew?", "failed")
    if rolling.failed:
        done = f"; done before: {', '.join(rolling.done)}" if rolling.done else ""
        return Progress(f"{rolling.failed}{done}", "failed")
    if not rolling.current and len(rolling.done) == len(rolling.workers):
        return Progress(f"started again: {', '.join(rolling.done)}", "done")
    worker = _find(status, rolling.current)
    doing = "" if worker is None else _left(worker) if worker.state == "draining" else f"{worker.worker_id} starts"
    return Progress(f"{len(rolling.done)} of {len(rolling.workers)} started again; {doing}")


def _find(status: ClusterStatus, worker_id: str) -> WorkerStatus | None:
    return next((worker for worker in status.workers if worker.worker_id == worker_id), None)


def _left(worker: WorkerStatus) -> str:
    transfers = worker.exports_open + worker.imports_open
    return f"{worker.worker_id} has {worker.running} running, {worker.waiting} waiting, {transfers} transfers"


def _carry_out(
    url: str,
    api_key: str,
    path: str,
    order: DrainOrder | RoleOrder | RestartOrder | ScaleOrder,
    no_wait: bool,
    progress: Callable[[ClusterStatus], Progress],
) -> None:
    try:
        accepted = give_order(url, api_key, path, order)
        if no_wait:
            sys.stdout.write(f"{accepted.message}; `twinpool status` shows how far it is\n")
            return
        last = _watch(url, api_key, accepted, progress)
    except CallFailed as error:
        fail(str(error), 1)
    if last.outcome != "done":
        fail(last.text if last.outcome else f"not done in time: {last.text}", 1)
    sys.stdout.write(f"{last.text}\n")


def _watch(url: str, api_key: str, accepted: Accepted, progress: Callable[[ClusterStatus], Progress]) -> Progress:
    """Shows a line until the order is done, has failed, or is late: live on a terminal, one per change elsewhere."""
    console = Console(highlight=False)
    deadline_s = time.monotonic() + accepted.within_s + _MARGIN_S
    with console.status(accepted.message) as line:
        shown = ""
        while True:
            now = progress(fetch_status(url, api_key)[1])
            if now.outcome or time.monotonic() >= deadline_s:
                return now
            if now.text != shown:
                shown = now.text
                line.update(shown)
                if not console.is_terminal:
                    console.print(shown, markup=False, soft_wrap=True)
            time.sleep(_LOOK_AGAIN_S)
