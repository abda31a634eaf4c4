"""Drives the load generator against the server of known timing, and compares what both say."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np

from lab.load.client import Record, Target
from lab.load.drive import Load
from lab.load.plan import Piece, Session, Turn
from lab.load.prompts import Prompts
from lab.server_process import REPOSITORY, free_port

ALLOWED_S = 0.005
PERCENTILES = (10.0, 50.0, 90.0, 95.0, 98.0, 99.0)
_JUDGED_BELOW = 99.0
_START_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Row:
    """One percentile, as the server sent and as the generator measured. Seconds."""

    percentile: float
    ttft_sent_s: float
    ttft_s: float
    gap_sent_s: float
    gap_s: float


@dataclass(frozen=True)
class Found:
    """What a check gave."""

    rows: tuple[Row, ...]
    num_streams: int
    num_failed: int
    most_at_once: int
    cpu_share: float
    """Of one core, that this process used."""

    @property
    def added_s(self) -> float:
        """The most by which a percentile below p99 differs."""
        judged = [row for row in self.rows if row.percentile < _JUDGED_BELOW]
        return max(max(abs(r.ttft_s - r.ttft_sent_s), abs(r.gap_s - r.gap_sent_s)) for r in judged)


def check(num_streams: int, tokens_per_s: float, seconds: float) -> Found:
    """Streams begin evenly over half of the time that each lasts, so that all run at once for the other half."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "lab.load_check.server", str(port), str(tokens_per_s)], cwd=REPOSITORY
    ) as server:
        try:
            return asyncio.run(_check(f"http://127.0.0.1:{port}", num_streams, round(tokens_per_s * seconds), seconds))
        finally:
            server.kill()


async def _check(url: str, num_streams: int, num_tokens: int, seconds: float) -> Found:
    await _until_up(url)
    turn = Turn((Piece(0, 16),), num_tokens)
    sessions = [Session(number * seconds / 2 / num_streams, "s", number, (turn,)) for number in range(num_streams)]
    target = Target(url, "known", {}, {}, 60 + 4 * seconds)
    load = Load([target], sessions, Prompts(lambda text: list(range(len(text)))), lambda _record: None)
    cpu_s, began_s = time.process_time(), time.monotonic()
    await load.run()
    cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    async with aiohttp.ClientSession() as http, http.get(f"{url}/sent") as answer:
        sent = msgspec.json.decode(await answer.read(), type=list[list[float]])
    return compare(load.records, sent, cpu_share)


def compare(records: Sequence[Record], sent: Sequence[Sequence[float]], cpu_share: float) -> Found:
    """`sent`: per stream, the seconds from its request to each token."""
    whole = [record for record in records if not record.error]
    measured = [r.ttft_s for r in whole if r.ttft_s is not None], [gap for r in whole for gap in r.gaps_s]
    truth = [times[0] for times in sent if times], [gap for times in sent for gap in np.diff(times)]
    ttft_sent, ttft, gap_sent, gap = (
        np.percentile(values, PERCENTILES) if values else np.full(len(PERCENTILES), np.nan)
        for values in (truth[0], measured[0], truth[1], measured[1])
    )
    rows = tuple(
        Row(percentile, *map(float, values))
        for percentile, *values in zip(PERCENTILES, ttft_sent, ttft, gap_sent, gap, strict=True)
    )
    changes = sorted([(r.sent_s, 1) for r in whole] + [(r.sent_s + r.end_to_end_s, -1) for r in whole])
    at_once = np.cumsum([change for _, change in changes])
    return Found(rows, len(records), len(records) - len(whole), int(at_once.max(initial=0)), cpu_share)


async def _until_up(url: str) -> None:
    """Raises OSError when it is not there in time."""
    until_s = time.monotonic() + _START_DEADLINE_S
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/up"):
                    return
            except aiohttp.ClientError as error:
                if time.monotonic() > until_s:
                    raise OSError(f"the server of the check did not start within {_START_DEADLINE_S:g} s") from error
                await asyncio.sleep(0.05)
