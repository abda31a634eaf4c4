"""Kills a random worker every few seconds under streaming load, and compares every stream with the undisturbed one.

`python -m lab.kill_storm` starts 2P2D of simulated workers, a process each; `python -m lab.kill_storm CONFIG.yaml` any
other cluster. First every prompt is answered in peace; then the same prompts are sent again and again while workers
die. Ends with 1 if a stream differed or failed.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from cluster.status import ClusterStatus
from lab.launches import twinpool
from lab.server_process import Server, free_port

SIMULATED: dict[str, Any] = {
    "engine": "simulated",
    "pools": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
    "simulation": {"workers_per_process": 1},
}
_STREAM_TIMEOUT_S = 60.0
_TOKEN_IDS = (100, 40_000)
_SHOWN_CHARS = 120


@dataclass(frozen=True)
class Work:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Storm:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    differing: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By the beginning of the error."""
    longest_gap_s: float = 0.0


class StreamFailed(Exception):
    """A stream ended in an error, or broke off."""


def make_work(
    rng: random.Random, number: int, prompt_tokens: tuple[int, int], answer_tokens: tuple[int, int]
) -> list[Work]:
    """Requests of different lengths, of which no two begin alike."""
    return [
        Work(
            tuple(rng.randrange(*_TOKEN_IDS) for _ in range(rng.randint(*prompt_tokens))),
            rng.randint(*answer_tokens),
        )
        for _ in range(number)
    ]


async def answer(session: aiohttp.ClientSession, url: str, model: str, work: Work) -> tuple[list[int], float]:
    """The tokens of one greedy stream and its longest silence after the first. Raises `StreamFailed`."""
    body = {
        "model": model, "prompt": list(work.prompt), "max_tokens": work.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    heard_s, longest_s, is_over = 0.0, 0.0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise StreamFailed(f"{reply.status} {(await reply.text())[:_SHOWN_CHARS]}")
            async for line in reply.content:
                is_over = is_over or line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise StreamFailed(f"in mid-stream: {str(event['error'].get('message'))[:_SHOWN_CHARS]}")
                now_s = time.monotonic()
                longest_s = max(longest_s, now_s - heard_s if heard_s else 0.0)
                heard_s = now_s
                tokens += [token for choice in event["choices"] for token in choice["token_ids"] or ()]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StreamFailed(f"{type(error).__name__} {error}") from error
    if not is_over:
        raise StreamFailed("the stream broke off")
    return tokens, longest_s


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    turns: "itertools.cycle[tuple[Work, list[int]]]",
    storm: Storm,
    until_s: float,
) -> None:
    while time.monotonic() < until_s:
        work, expected = next(turns)
        try:
            tokens, gap_s = await answer(session, url, model, work)
        except StreamFailed as error:
            storm.failed[str(error)] += 1
            await asyncio.sleep(0.1)  # a server that is down is not asked a thousand times a second
            continue
        storm.longest_gap_s = max(storm.longest_gap_s, gap_s)
        if tokens == expected:
            storm.equal += 1
        else:
            storm.differing += 1


async def _status(session: aiohttp.ClientSession, url: str) -> ClusterStatus:
    async with session.get(f"{url}/twinpool/status") as reply:
        return msgspec.json.decode(await reply.read(), type=ClusterStatus)


async def _killer(
    session: aiohttp.ClientSession, server: Server, rng: random.Random, every_s: float, storm: Storm
) -> None:
    while True:
        await asyncio.sleep(every_s)
        ready = [worker for worker in (await _status(session, server.url)).workers if worker.state == "ready"]
        ours = server.processes()
        victims = [worker for worker in ready if worker.pid in ours]
        if victims:
            victim = rng.choice(victims)
            os.kill(victim.pid, signal.SIGKILL)
            storm.kills[victim.worker_id] += 1


async def run_storm(
    server: Server, works: Sequence[Work], clients: int, every_s: float, seconds: float, rng: random.Random
) -> Storm:
    """Answers everything in peace, then again while workers die."""
    timeout = aiohttp.ClientTimeout(total=_STREAM_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(f"{server.url}/v1/models") as reply:
            model = str((await reply.json())["data"][0]["id"])
        calm = await asyncio.gather(*(answer(session, server.url, model, work) for work in works))
        turns = itertools.cycle([(work, tokens) for work, (tokens, _) in zip(works, calm, strict=True)])
        storm = Storm()
        killer = asyncio.create_task(_killer(session, server, rng, every_s, storm))
        until_s = time.monotonic() + seconds
        running = asyncio.gather(*(_client(session, server.url, model, turns, storm, until_s) for _ in range(clients)))
        await asyncio.wait((running, killer), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait((running,))
            killer.result()  # raises what ended it
        killer.cancel()
        await asyncio.wait((killer,))
        running.result()
        return storm


def table_of(storm: Storm, seconds: float) -> Table:
    """What to show."""
    total = storm.equal + storm.differing + sum(storm.failed.values())
    table = Table("", "", title=f"{sum(storm.kills.values())} kills in {seconds:g} s")
    table.add_row("killed", ", ".join(f"{count} x {worker}" for worker, count in sorted(storm.kills.items())))
    table.add_row("streams", f"{total:,}")
    table.add_row("equal to the undisturbed one", f"{storm.equal:,}")
    table.add_row("differing", f"{storm.differing:,}")
    for error, count in storm.failed.most_common():
        table.add_row("failed", f"{count} x {error}")
    table.add_row("longest silence in a stream", f"{storm.longest_gap_s:.2f} s")
    return table


def main() -> int:
    """Runs it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.kill_storm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", nargs="?", type=Path, help="cluster under test; without it simulated 2P2D")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long workers die")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two deaths")
    parser.add_argument("--clients", type=int, default=16, help="streams at once")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(50, 1500), metavar=("MIN", "MAX"))
    parser.add_argument("--answer-tokens", type=int, nargs=2, default=(20, 300), metavar=("MIN", "MAX"))
    parser.add_argument("--model", help="directory of the model; without it that of the configuration")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config: dict[str, Any] = yaml.safe_load(options.config.read_text()) if options.config else dict(SIMULATED)
    if options.model:
        config["model"] = str(Path(options.model).absolute())  # the server runs in a directory of its own
    config["server"] = {**config.get("server", {}), "port": free_port()}
    rng = random.Random(options.seed)
    works = make_work(rng, 3 * options.clients, tuple(options.prompt_tokens), tuple(options.answer_tokens))
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="twinpool-storm-") as directory:
        server = Server(twinpool("kill-storm", config, Path(directory)), Path(directory))
        try:
            server.wait_until_healthy()
            storm = asyncio.run(run_storm(server, works, options.clients, options.every, options.seconds, rng))
        finally:
            server.stop()
    console.print(table_of(storm, options.seconds))
    return 1 if storm.differing or storm.failed else 0


if __name__ == "__main__":
    sys.exit(main())
