"""`python -m lab.measure`: what the hand-over costs, against a bare vLLM server in the same run.

Starts a bare vLLM server with one core, measures it and stops it; then starts a cluster of one prefill and one
decode worker, a core each, with the same engine options, and measures that. Everything stays on the loopback
interface. The table goes to stderr, the numbers as JSON to stdout.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from cluster.embedded_model import EMBEDDED_MODEL_NAME, ensure_embedded_model
from cluster.status import ClusterStatus
from lab.cpu_use import cpu_seconds, idle_cores
from lab.launches import bare_vllm, twinpool
from lab.server_process import Launch, Server, free_port
from lab.streams import TokenTimes, all_at_once, median_step_s, one_by_one, random_prompt

ENGINE: Mapping[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 512, "enforce_eager": True}
KV_GIB = 2
SEED = 20
WARM_UP_TOKENS = (64, 600)
LONG_OUTPUT = 24
CROWD, CROWD_PROMPT, CROWD_OUTPUT = 16, 32, 64
SETTLE_S = 3.0
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Served:
    """What both kinds of servers are measured for. Seconds unless the name says otherwise."""

    start_s: float
    ttft_s: float
    """Median over prompts of the length asked for, none of them cached."""
    ttft_worst_s: float
    first_gap_s: float
    """Median from the first token to the second."""
    first_gap_worst_s: float
    decode_step_s: float
    api_cpu_ms_per_token: float
    """CPU of the process that serves HTTP, per token of 16 streams at once."""
    idle_cores: float


@dataclass(frozen=True)
class HandedOver:
    """What only the cluster has."""

    link: str
    handovers: int
    bytes_moved: int
    copy_s: float
    bytes_per_s: float
    """While copying."""
    after_prefill_s: float
    """The last hand-over: from the end of its prefill until the decode worker held every block."""
    hosts_cpu_ms_per_token: float
    """CPU of the two worker hosts for the same 16 streams."""


@dataclass(frozen=True)
class Report:
    """Everything, as it is printed."""

    prompt_tokens: int
    bare: Served
    twinpool: Served
    handover: HandedOver


def measure(model: str, prompt_tokens: int, repeats: int, idle_s: float, directory: Path) -> Report:
    """Runs all of it. Raises `ServerFailed` or `StreamFailed`, which say what went wrong."""
    flags = {**ENGINE, "disable_log_stats": False}
    launch = bare_vllm("bare-vllm", model, EMBEDDED_MODEL_NAME, free_port(), flags, core="0", kv_gib=KV_GIB)
    bare, _ = _serve(launch, directory, prompt_tokens, repeats, idle_s)
    config = {
        "model": model,
        "served_model_name": EMBEDDED_MODEL_NAME,
        "engine": {**ENGINE, "kv_cache_memory_bytes": KV_GIB << 30},
        "scheduling": {"remote_prefill_min_tokens": 1},
        "server": {"port": free_port()},
    }
    ours, handover = _serve(twinpool("twinpool", config, directory), directory, prompt_tokens, repeats, idle_s)
    if handover is None:
        raise ValueError("the cluster reported no hand-over, so nothing was prefilled remotely; see its log")
    return Report(prompt_tokens, bare, ours, handover)


def _serve(
    launch: Launch, directory: Path, prompt_tokens: int, repeats: int, idle_s: float
) -> tuple[Served, HandedOver | None]:
    _say(f"starting {launch.name}")
    since = time.monotonic()
    server = Server(launch, directory)
    try:
        server.wait_until_healthy()
        start_s = time.monotonic() - since
        _say(f"{launch.name} is up after {start_s:.1f} s; measuring")
        return _measure_server(server, start_s, prompt_tokens, repeats, idle_s)
    finally:
        server.stop()


def _measure_server(
    server: Server, start_s: float, prompt_tokens: int, repeats: int, idle_s: float
) -> tuple[Served, HandedOver | None]:
    rng = random.Random(SEED)

    def run(how: Callable[..., Any], prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTimes]:
        streams: list[TokenTimes] = asyncio.run(how(server.url, EMBEDDED_MODEL_NAME, prompts, max_tokens, DEADLINE_S))
        return streams

    run(one_by_one, [random_prompt(rng, n) for n in WARM_UP_TOKENS], 4)
    before = _status(server)
    long = run(one_by_one, [random_prompt(rng, prompt_tokens) for _ in range(repeats)], LONG_OUTPUT)
    after = _status(server)

    hosts = [worker.pid for worker in after.workers] if after else []
    api_before, hosts_before = cpu_seconds([server.process.pid]), cpu_seconds(hosts)
    run(all_at_once, [random_prompt(rng, CROWD_PROMPT) for _ in range(CROWD)], CROWD_OUTPUT)
    api_cpu_s = cpu_seconds([server.process.pid]) - api_before
    hosts_cpu_s = cpu_seconds(hosts) - hosts_before

    time.sleep(SETTLE_S)
    served = Served(
        start_s=start_s,
        ttft_s=statistics.median(times.ttft_s for times in long),
        ttft_worst_s=max(times.ttft_s for times in long),
        first_gap_s=statistics.median(times.gaps_s[0] for times in long),
        first_gap_worst_s=max(times.gaps_s[0] for times in long),
        decode_step_s=median_step_s(long),
        api_cpu_ms_per_token=api_cpu_s / (CROWD * CROWD_OUTPUT) * 1e3,
        idle_cores=idle_cores(server.process.pid, idle_s),
    )
    handover = _handover(before, after, hosts_cpu_s) if before and after else None
    return served, handover


def _handover(before: ClusterStatus, after: ClusterStatus, hosts_cpu_s: float) -> HandedOver | None:
    last = after.last_request
    if last is None or last.link is None or last.handover_s is None:
        return None
    earlier = {link.link: link for link in before.links}
    moved = copied = 0.0
    for link in after.links:
        known = earlier.get(link.link)
        moved += link.bytes_moved - (known.bytes_moved if known else 0)
        copied += link.copy_s - (known.copy_s if known else 0.0)
    return HandedOver(
        link=last.link,
        handovers=after.transfers.get("loaded", 0) - before.transfers.get("loaded", 0),
        bytes_moved=int(moved),
        copy_s=copied,
        bytes_per_s=moved / copied if copied else 0.0,
        after_prefill_s=last.handover_s,
        hosts_cpu_ms_per_token=hosts_cpu_s / (CROWD * CROWD_OUTPUT) * 1e3,
    )


def _status(server: Server) -> ClusterStatus | None:
    """None from a server that is no cluster. Waits a beat, because workers report once a second."""

    async def ask() -> ClusterStatus | None:
        await asyncio.sleep(1.5)
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{server.url}/twinpool/status") as answer,
        ):
            return msgspec.json.decode(await answer.read(), type=ClusterStatus) if answer.status == 200 else None

    return asyncio.run(ask())


def table(report: Report) -> Table:
    """For people."""
    bare, ours, moved = report.bare, report.twinpool, report.handover
    shown = Table(title=f"{report.prompt_tokens}-token prompts, one core per engine", title_justify="left")
    shown.add_column("")
    for column in ("bare vLLM", "twinpool 1P1D", "ratio"):
        shown.add_column(column, justify="right")

    def row(name: str, theirs: float, mine: float, unit: str, digits: int = 1, scale: float = 1e3) -> None:
        ratio = f"{mine / theirs:.2f}" if theirs else ""
        shown.add_row(name, f"{theirs * scale:,.{digits}f} {unit}", f"{mine * scale:,.{digits}f} {unit}", ratio)

    row("start", bare.start_s, ours.start_s, "s", scale=1)
    row("TTFT, median", bare.ttft_s, ours.ttft_s, "ms", 0)
    row("TTFT, worst", bare.ttft_worst_s, ours.ttft_worst_s, "ms", 0)
    row("token 1 to 2, median", bare.first_gap_s, ours.first_gap_s, "ms")
    row("token 1 to 2, worst", bare.first_gap_worst_s, ours.first_gap_worst_s, "ms")
    row("decode step, median", bare.decode_step_s, ours.decode_step_s, "ms")
    row("API CPU per token", bare.api_cpu_ms_per_token, ours.api_cpu_ms_per_token, "ms", 3, 1)
    row("idle CPU, all", bare.idle_cores, ours.idle_cores, "% core", 1, 100)
    shown.add_section()
    copy_s = moved.copy_s / max(1, moved.handovers)
    allowed_s = 1.5 * ours.decode_step_s + copy_s
    facts = (
        ("hosts' CPU per token", f"{moved.hosts_cpu_ms_per_token:.3f} ms"),
        (f"moved over {moved.link}", f"{moved.bytes_moved / 1e6:,.1f} MB, {moved.handovers} times"),
        ("copying", f"{moved.bytes_per_s / 1e9:.2f} GB/s, {copy_s * 1e3:.1f} ms"),
        ("prefill end to all at D", f"{moved.after_prefill_s * 1e3:.1f} ms"),
        ("1.5 decode steps + copy", f"{allowed_s * 1e3:.1f} ms"),
    )
    for name, value in facts:
        shown.add_row(name, "", value, "")
    return shown


def _say(what: str) -> None:
    Console(stderr=True).print(f"[dim]{what}[/dim]")


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a model; the embedded one if not given")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=5, help="long prompts per server")
    parser.add_argument("--idle-s", type=float, default=20.0, help="how long idle CPU is measured")
    options = parser.parse_args()
    model = options.model or str(asyncio.run(ensure_embedded_model(_say)))
    _say(f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB of memory")
    with tempfile.TemporaryDirectory(prefix="twinpool-lab-") as directory:
        report = measure(model, options.prompt_tokens, options.repeats, options.idle_s, Path(directory))
    Console(stderr=True).print(table(report))
    sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")


if __name__ == "__main__":
    main()
