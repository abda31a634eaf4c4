"""Offers a cluster more and more than it can do, and shows what becomes of goodput, refusals, queue and memory.

`python -m lab.overload` starts 2P2D of simulated workers behind the real proxy, once per policy, and sends load at
multiples of what the prefill workers can compute, whatever comes back. The highest load is offered twice: what the
proxy holds after the second time and not after the first has been leaked.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from cluster.config import ClusterConfig, SimulationConfig
from cluster.status import ClusterStatus
from lab.launches import twinpool
from lab.load.client import Record, Target
from lab.load.drive import Load
from lab.load.plan import plan_sessions
from lab.load.prompts import Prompts, server_tokenizer
from lab.load.summary import is_good, spread
from lab.load.work import WorkClass
from lab.server_process import Server, free_port

FACTORS = (0.5, 1.0, 2.0, 4.0, 4.0)
GOOD_SHARE = 0.9
"""Goodput at the highest load, at least, of the best."""
REFUSED_WITHIN_S = 0.1
TTFT_S, ITL_S = 2.0, 0.3
_PREFILL_WORKERS = 2
_PROMPT_TOKENS, _OUTPUT_TOKENS = 2000, 24
_SAMPLE_S = 0.5
_GRACE_S = TTFT_S + 2.0
"""After the last request has been sent; who has no answer then is cut off."""
_IDLE_WITHIN_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """What one load came to."""

    factor: float
    """Of the capacity."""
    offered: int
    good: int
    late: int
    """Came whole, and the first token too late."""
    uneven: int
    """Came whole, and not evenly."""
    refused: int
    untold: int
    """Refused without a `Retry-After`."""
    refused_p99_s: float | None
    goodput_per_s: float
    longest_queue: int
    left_in_queue: int
    """After everybody had left."""
    rss_mib: float
    """Of the proxy, then."""


def config_of(policy: str, port: int) -> dict[str, Any]:
    """A cluster that one machine can simulate in real time."""
    return {
        "engine": "simulated",
        "pools": {"prefill": {"replicas": _PREFILL_WORKERS}, "decode": {"replicas": 2}},
        "slo": {"ttft_s": TTFT_S, "itl_s": ITL_S, "on_overload": policy},
        "scheduling": {"prior_prefill_tokens_per_s": 8000},
        "server": {"port": port},
    }


def capacity_per_s(costs: SimulationConfig, workers: int, prompt_tokens: int) -> float:
    """Prompts per second that the prefill workers compute."""
    chunks = -(-prompt_tokens // costs.max_num_batched_tokens)
    pairs = prompt_tokens * prompt_tokens / 2
    alone_s = chunks * costs.chunk_s + prompt_tokens / costs.prefill_tokens_per_s + pairs * costs.attention_s_per_pair
    return workers * costs.time_scale / alone_s


def outcome_of(
    factor: float, work: WorkClass, records: Sequence[Record], seconds: float, queue: Sequence[int], rss_mib: float
) -> Outcome:
    """`queue`: its length from time to time; the last one when everybody had left."""
    refused = [record for record in records if record.status in (429, 503)]
    whole = [record for record in records if not record.error]
    late = [record for record in whole if not is_good(record, replace(work, itl_s=None))]
    uneven = [record for record in whole if not is_good(record, replace(work, ttft_s=None))]
    good = sum(is_good(record, work) for record in whole)
    untold = sum(record.retry_after_s is None for record in refused)
    return Outcome(
        factor=factor,
        offered=len(records),
        good=good,
        late=len(late),
        uneven=len(uneven),
        refused=len(refused),
        untold=untold,
        refused_p99_s=spread(r.end_to_end_s for r in refused).p99,
        goodput_per_s=good / seconds,
        longest_queue=max(queue, default=0),
        left_in_queue=queue[-1] if queue else 0,
        rss_mib=rss_mib,
    )


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as it should be; the last outcome is that of the highest load."""
    last, best = outcomes[-1], max(outcome.goodput_per_s for outcome in outcomes)
    found = []
    if last.goodput_per_s < GOOD_SHARE * best:
        found.append(f"goodput fell from {best:.2f}/s to {last.goodput_per_s:.2f}/s")
    if any(outcome.untold for outcome in outcomes):
        found.append("some were refused without Retry-After")
    if last.refused_p99_s is not None and last.refused_p99_s > REFUSED_WITHIN_S:
        found.append(f"refusals took {1000 * last.refused_p99_s:.0f} ms (p99)")
    if any(outcome.left_in_queue for outcome in outcomes):
        found.append("requests stayed in the queue when everybody had left")
    return found


async def offer(server: Server, model: str, work: WorkClass, factor: float, seconds: float, seed: int) -> Outcome:
    """Sends one load and waits until the cluster is idle again."""
    sessions = plan_sessions([work], seconds, seed)
    encode = server_tokenizer(server.url, model, "none")
    target = Target(server.url, model, {}, {"ignore_eos": True}, 120.0)
    load = Load([target], sessions, await asyncio.to_thread(Prompts, encode), lambda _record: None)
    queue: list[int] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
        driving = asyncio.create_task(load.run())
        sampling = asyncio.create_task(_sample(http, server.url, queue))
        await asyncio.wait((driving,), timeout=seconds + _GRACE_S)
        driving.cancel()
        await asyncio.wait((driving,))
        sampling.cancel()
        await asyncio.wait((sampling,))
        async with asyncio.timeout(_IDLE_WITHIN_S):
            queue.append(await _once_idle(http, server.url))
    rss_mib = psutil.Process(server.process.pid).memory_info().rss / 2**20
    return outcome_of(factor, work, load.records, seconds, queue, rss_mib)


async def _sample(http: aiohttp.ClientSession, url: str, queue: list[int]) -> None:
    while True:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            queue.append((await _status(http, url)).requests_waiting)
        await asyncio.sleep(_SAMPLE_S)


async def _once_idle(http: aiohttp.ClientSession, url: str) -> int:
    """Asks until nothing runs any more; the length of the queue then."""
    while True:
        status = await _status(http, url)
        if not status.requests_running:
            return status.requests_waiting
        await asyncio.sleep(_SAMPLE_S)


async def _status(http: aiohttp.ClientSession, url: str) -> ClusterStatus:
    async with http.get(f"{url}/twinpool/status") as reply:
        return msgspec.json.decode(await reply.read(), type=ClusterStatus)


async def run_policy(server: Server, factors: Sequence[float], seconds: float, seed: int) -> list[Outcome]:
    """Every load in turn, on one cluster."""
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/v1/models") as reply:
        model = str((await reply.json())["data"][0]["id"])
    capacity = capacity_per_s(ClusterConfig().simulation, _PREFILL_WORKERS, _PROMPT_TOKENS)
    outcomes = []
    for number, factor in enumerate(factors):
        work = WorkClass("load", capacity * factor, _PROMPT_TOKENS, _OUTPUT_TOKENS, TTFT_S, ITL_S)
        outcomes.append(await offer(server, model, work, factor, seconds, seed + number))
    return outcomes


def table_of(policy: str, outcomes: Sequence[Outcome]) -> Table:
    """What to show."""
    table = Table(title=f"on_overload: {policy} (simulated engines)")
    for name in ("load", "offered", "good", "late", "uneven", "goodput", "refused", "p99", "queue", "left", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for o in outcomes:
        p99 = "" if o.refused_p99_s is None else f"{1000 * o.refused_p99_s:.0f} ms"
        row = (
            f"{o.factor:g} x",
            str(o.offered),
            str(o.good),
            str(o.late),
            str(o.uneven),
            f"{o.goodput_per_s:.2f}/s",
            str(o.refused),
            p99,
        )
        table.add_row(*row, str(o.longest_queue), str(o.left_in_queue), f"{o.rss_mib:.0f}")
    return table


def main() -> int:
    """Runs it; 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m lab.overload", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", nargs="+", default=["reject", "demote"], choices=["reject", "demote", "queue"])
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS, help="multiples of the capacity")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, bad = Console(highlight=False, width=max(100, Console().width)), False
    for policy in options.policies:
        with tempfile.TemporaryDirectory(prefix="twinpool-overload-") as directory:
            server = Server(twinpool("overload", config_of(policy, free_port()), Path(directory)), Path(directory))
            try:
                server.wait_until_healthy()
                outcomes = asyncio.run(run_policy(server, options.factors, options.seconds, options.seed))
            finally:
                server.stop()
        console.print(table_of(policy, outcomes))
        for complaint in complaints(outcomes):
            console.print(f"{policy}: {complaint}", style="red")
            bad = True
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
