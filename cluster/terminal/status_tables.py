"""`twinpool status` as tables."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.status import ClusterStatus, WorkerStatus
from cluster.terminal.demo import describe

_STATE_STYLE = {"ready": "green", "starting": "yellow", "dead": "red"}


def status_tables(status: ClusterStatus) -> RenderableType:
    """Workers with load and KV blocks, links, hand-overs, and the last request."""
    head = Text(f"{status.model}: {status.requests_running} running, {status.requests_waiting} waiting")
    parts: list[RenderableType] = [head, _workers(status), _links(status)]
    outcomes = [f"{count} {name}" for name, count in status.transfers.items()]
    failures = [f"{count} x {name}" for name, count in status.transfer_failures.items() if count]
    parts.append(Text(f"Hand-overs: {', '.join(outcomes) or 'none yet'}; failures: {', '.join(failures) or 'none'}"))
    if status.last_request is not None:
        parts.append(Text(f"Last hand-over: {describe(status.last_request.ttft_s, status.last_request)}"))
    return Group(*parts)


def _workers(status: ClusterStatus) -> Table:
    table = Table("worker", "state")
    for title in ("running", "waiting", "KV blocks", "free", "used", "leased", "transfers"):
        table.add_column(title, justify="right")
    table.add_column("links")
    for worker in status.workers:
        blocks = worker.blocks
        state = Text(worker.state, style=_STATE_STYLE.get(worker.state, ""))
        if worker.cause:
            state.append(f" ({worker.cause})", style="dim")
        numbers = (worker.running, worker.waiting, blocks.total, blocks.free, blocks.used, blocks.leased)
        transfers = f"{worker.exports_open} out" if worker.role == "prefill" else f"{worker.imports_open} in"
        table.add_row(worker.worker_id, state, *(f"{number:,}" for number in numbers), transfers, _peers(worker))
    return table


def _peers(worker: WorkerStatus) -> str:
    return "\n".join(sorted(set(worker.peers.values())))


def _links(status: ClusterStatus) -> Table:
    table = Table("link")
    for title in ("moved", "copying", "rate"):
        table.add_column(title, justify="right")
    for link in status.links:
        rate = f"{link.bytes_moved / link.copy_s / 1e9:.2f} GB/s" if link.copy_s > 0 else "-"
        table.add_row(link.link, f"{link.bytes_moved / 1e6:,.1f} MB", f"{link.copy_s:.3f} s", rate)
    return table
