"""What servers carry while the load runs: sequences at a time, and KV bytes that were moved."""

import asyncio
import re
import time
from collections.abc import Sequence

import aiohttp
import msgspec
import psutil

from cluster.status import ClusterStatus
from lab.experiments.results import Held, StepShape
from lab.server_process import Server

_EVERY_S = 0.25
_TIMEOUT = aiohttp.ClientTimeout(total=5)
_PREEMPTIONS, _QUERIES, _HITS = (
    re.compile(rf"^vllm:{name}_total(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
    for name in ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
)
_BLOCKS = re.compile(r'^vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', re.MULTILINE)
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


async def watch_shapes(servers: Sequence[Server], shapes: list[StepShape]) -> None:
    """Appends a sample of vLLM's own gauges, summed over servers, four times a second until it is cancelled."""
    began_s = time.perf_counter()
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        while True:
            counts = {"running": 0, "waiting": 0}
            for server in servers:
                for name, value in _GAUGE.findall(await _text(http, f"{server.url}/metrics")):
                    counts[name] += int(float(value))
            shapes.append(StepShape(time.perf_counter() - began_s, counts["running"], waiting=counts["waiting"]))
            await asyncio.sleep(_EVERY_S)


async def steps_since(server: Server, began_s: float) -> list[StepShape]:
    """Every step of a teaching server since `began_s` on the machine's monotonic clock."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        text = await _text(http, f"{server.url}/steps")
    steps = msgspec.json.decode(text, type=list[StepShape]) if text else []
    return [
        StepShape(step.at_s - began_s, step.sequences, step.tokens, step.waiting)
        for step in steps
        if step.at_s >= began_s
    ]


async def kv_bytes(servers: Sequence[Server]) -> int:
    """That clusters among these servers have moved since they started."""
    total = 0
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        for server in servers:
            text = await _text(http, f"{server.url}/twinpool/status")
            if text:
                total += sum(link.bytes_moved for link in msgspec.json.decode(text, type=ClusterStatus).links)
    return total


async def held(servers: Sequence[Server], before: Held | None = None) -> Held:
    """Counts are those since `before`."""
    found = Held()
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        for server in servers:
            metrics = await _text(http, f"{server.url}/metrics")
            found.preemptions += _sum(_PREEMPTIONS, metrics)
            found.prompt_tokens += _sum(_QUERIES, metrics)
            found.cached_tokens += _sum(_HITS, metrics)
            found.memory_bytes += sum(_pss_bytes(pid) for pid in server.processes())
            found.kv_blocks = max(found.kv_blocks, await _kv_blocks(http, server, metrics))
    if before is not None:
        found.preemptions -= before.preemptions
        found.prompt_tokens -= before.prompt_tokens
        found.cached_tokens -= before.cached_tokens
    return found


async def _kv_blocks(http: aiohttp.ClientSession, server: Server, metrics: str) -> int:
    if text := await _text(http, f"{server.url}/twinpool/status"):
        workers = msgspec.json.decode(text, type=ClusterStatus).workers
        return max((worker.blocks.total for worker in workers if worker.role == "decode"), default=0)
    return max((int(blocks) for blocks in _BLOCKS.findall(metrics)), default=0)


def _sum(pattern: re.Pattern[str], metrics: str) -> int:
    return sum(int(float(value)) for value in pattern.findall(metrics))


def _pss_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0  # it ended


async def _text(http: aiohttp.ClientSession, url: str) -> str:
    """Empty from a server that does not know the path, or is too busy."""
    try:
        async with http.get(url) as answer:
            return await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ""
