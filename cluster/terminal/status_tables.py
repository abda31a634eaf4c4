"""`twinpool status` as tables."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.messages import LEAVE
from cluster.status import ApiServerStatus, AutoscaleStatus, ClusterStatus, WorkerStatus
from cluster.terminal.demo import describe

_STATE_STYLE = {"ready": "green", "starting": "yellow", "asleep": "blue", "draining": "yellow", "dead": "red"}


def status_tables(status: ClusterStatus) -> RenderableType:
    """Workers with load and KV blocks, links, hand-overs, and the last request."""
    sleep = "" if status.sleep == "awake" else f"{status.sleep}, "
    head = Text(f"{status.model}: {sleep}{status.requests_running} running, {status.requests_waiting} waiting")
    parts: list[RenderableType] = [head, *_simulated(status), _workers(status), *_remarks(status), _links(status)]
    if status.classes:
        parts.append(_classes(status))
    if status.autoscale is not None:
        parts += _autoscale(status.autoscale)
    if status.api_servers:
        parts.append(Text(f"Further API servers: {'; '.join(map(_api_server, status.api_servers))}"))
    outcomes = [f"{count} {name}" for name, count in status.transfers.items()]
    failures = [f"{count} x {name}" for name, count in status.transfer_failures.items() if count]
    parts.append(Text(f"Hand-overs: {', '.join(outcomes) or 'none yet'}; failures: {', '.join(failures) or 'none'}"))
    if status.last_request is not None:
        parts.append(Text(f"Last hand-over: {describe(status.last_request.ttft_s, status.last_request)}"))
    return Group(*parts)


def _simulated(status: ClusterStatus) -> list[Text]:
    """A line that nobody overlooks when workers are only simulated."""
    count = sum(worker.simulated for worker in status.workers)
    if not count:
        return []
    which = "All workers are" if count == len(status.workers) else f"{count} of {len(status.workers)} workers are"
    return [Text(f"{which} SIMULATED: no engine runs, times come from a cost model, answers mean nothing", "yellow")]


def _autoscale(autoscale: AutoscaleStatus) -> list[Text]:
    """How many workers it wants, why it changed that last, and what more workers cannot help."""
    want = ", ".join(f"{count} {role}" for role, count in autoscale.want.items()) or "nothing yet"
    last = f"; last change: {autoscale.last_reason}" if autoscale.last_reason else ""
    warnings = [Text(f"Autoscaler: {warning}", style="yellow") for warning in autoscale.warnings]
    return [Text(f"Autoscaler wants {want}{last}"), *warnings]


def _api_server(server: ApiServerStatus) -> str:
    said = f"{server.requests:,} requests" if server.state == "ready" else server.note
    return f"{server.name} {server.state}" + (f", {said}" if said else "")


def _workers(status: ClusterStatus) -> Table:
    """Fits 80 columns; the KV blocks are free + used + leased of all."""
    table = Table("worker", "state")
    for title in ("running", "waiting", "KV blocks", "free", "used", "leased", "transfers"):
        table.add_column(title, justify="right", no_wrap=True)
    for worker in status.workers:
        blocks = worker.blocks
        state = Text(_state(worker), style=_STATE_STYLE.get(worker.state, ""))
        numbers = (worker.running, worker.waiting, blocks.total, blocks.free, blocks.used, blocks.leased)
        transfers = f"{worker.exports_open} out" if worker.role == "prefill" else f"{worker.imports_open} in"
        table.add_row(worker.worker_id, state, *(f"{number:,}" for number in numbers), transfers)
    table.columns[0].no_wrap = True
    table.box = SIMPLE_HEAD
    table.padding = (0, 0)
    return table


def _state(worker: WorkerStatus) -> str:
    """With the role, where the worker's name says another one."""
    as_role = "" if worker.worker_id.startswith(f"{worker.role}-") else f", {worker.role}"
    return f"{worker.state}{as_role}"


def _remarks(status: ClusterStatus) -> list[Text]:
    """Why a worker is gone, its leases and failures, which link each uses and why, and who is not paired."""
    remarks = []
    for worker in status.workers:
        if worker.cause:
            note = f"; {worker.note}" if worker.note else ""
            remarks.append(Text(f"{worker.worker_id}: {worker.cause}{note}", style="dim"))
        if worker.drains_to:
            then = "leaves" if worker.drains_to == LEAVE else f"serves as {worker.drains_to}"
            remarks.append(Text(f"{worker.worker_id} finishes what it has, then {then}", style="dim"))
        if worker.starts:
            remarks.append(Text(f"{worker.worker_id} was started again {worker.starts} times", style="dim"))
        for what, counts in (("holds leases", worker.leases), ("saw transfers fail", worker.transfer_failures)):
            if told := ", ".join(f"{count} x {name}" for name, count in counts.items() if count):
                remarks.append(Text(f"{worker.worker_id} {what}: {told}", style="dim"))
        if worker.prefix_events:
            style = "yellow" if worker.prefix_events == "unknown" and worker.state == "ready" else "dim"
            remarks.append(Text(f"{worker.worker_id} prefix events: {worker.prefix_events}", style=style))
        remarks += [
            Text(f"{worker.worker_id} reads over {link}", style="dim") for link in sorted(set(worker.peers.values()))
        ]
    for adapter in status.adapters:
        leaving = ", removed, in use by requests that still run" if adapter.leaving else ""
        remarks.append(Text(f"adapter {adapter.name}: {adapter.path}{leaving}", style="dim"))
        remarks += [
            Text(f"{worker_id} gets no requests with adapter {adapter.name}: {why}", style="yellow")
            for worker_id, why in adapter.lacking.items()
        ]
    for listener, reasons in status.connections_refused.items():
        told = ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
        remarks.append(Text(f"{listener} turned connections away: {told}", style="yellow"))
    remarks += [
        Text(f"{pair.prefill} and {pair.decode} are not paired: {', '.join(pair.differing_fields)}", style="yellow")
        for pair in status.refused_pairs
    ]
    return remarks


def _classes(status: ClusterStatus) -> Table:
    """Of those that got an answer or were turned away, how many had what their class promises."""
    table = Table("class", "targets", box=SIMPLE_HEAD)
    for title in ("requests", "attained", "late", "uneven", "rejected", "failed", "left"):
        table.add_column(title, justify="right", no_wrap=True)
    for kind in status.classes:
        count = {**dict.fromkeys(("attained", "rejected", "failed", "aborted"), 0), **kind.outcomes}
        both = count.get("missed_both", 0)
        late, uneven = count.get("missed_ttft", 0) + both, count.get("missed_itl", 0) + both
        total = sum(count.values())
        judged = total - count["aborted"]
        share = f"{count['attained'] / judged:.1%}" if judged else "-"
        numbers = (late, uneven, count["rejected"], count["failed"], count["aborted"])
        targets = f"{kind.ttft_s:g} s, {kind.itl_s * 1000:g} ms"
        table.add_row(kind.name, targets, f"{total:,}", share, *(f"{number:,}" for number in numbers))
    table.padding = (0, 0)
    return table


def _links(status: ClusterStatus) -> Table:
    table = Table("link", box=SIMPLE_HEAD)
    for title in ("moved", "copying", "rate"):
        table.add_column(title, justify="right")
    for link in status.links:
        rate = f"{link.bytes_moved / link.copy_s / 1e9:.2f} GB/s" if link.copy_s > 0 else "-"
        table.add_row(link.link, f"{link.bytes_moved / 1e6:,.1f} MB", f"{link.copy_s:.3f} s", rate)
    return table
