"""Pools that grow and shrink, a worker that drains and one that changes its role, under streams: no request fails."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from cluster.simulated.engine.vocabulary import Vocabulary, word_tokens
from cluster.status import WorkerStatus
from cluster.terminal.commands import app
from lab.kill_storm import StreamFailed, Work, answer, make_work
from lab.launches import twinpool
from lab.server_process import Server, free_port, wait_for_no_process
from tests.engine.observed import counters, status

pytestmark = pytest.mark.timeout(150)

CLIENTS = 12


class Streams(threading.Thread):
    """Clients that ask for one stream after another until they are told to end; each is compared token by token."""

    def __init__(self, url: str, model: str, turns: list[tuple[Work, list[int]]]) -> None:
        super().__init__(name="streams")
        self._url, self._model, self._turns = url, model, turns
        self._over = threading.Event()
        self.num_right = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._over.is_set():
            work, expected = self._turns[number % len(self._turns)]
            number += CLIENTS
            try:
                tokens, _ = await answer(session, self._url, self._model, work)
            except StreamFailed as error:
                self.wrong.append(str(error))
                continue
            if tokens == expected:
                self.num_right += 1
            else:
                self.wrong.append(f"{len(tokens)} tokens, or others, for {len(expected)}")

    def end(self) -> None:
        self._over.set()
        self.join(90)


@contextmanager
def streaming(server: Server, model: str) -> Iterator[Streams]:
    rng = random.Random(6)
    vocabulary = Vocabulary(word_tokens(Path(model)), 0)
    work = make_work(rng, 50, (100, 1500), (20, 120))
    turns = [(each, vocabulary.continuation(list(each.prompt), each.max_tokens)) for each in work]
    streams = Streams(server.url, status(server.url).model, turns)
    streams.start()
    try:
        yield streams
    finally:
        streams.end()


def order(server: Server, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, "--url", server.url])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()[-1]


def pool(server: Server, role: str) -> list[str]:
    workers: list[WorkerStatus] = status(server.url).workers
    assert all(worker.state == "ready" for worker in workers if worker.role == role), workers
    return [worker.worker_id for worker in workers if worker.role == role]


def test_pools_grow_and_shrink_and_change_under_streams_and_no_request_fails(model_path: str, log_dir: Path) -> None:
    config: dict[str, Any] = {
        "model": model_path,
        "engine": "simulated",
        "simulation": {"time_scale": 2},
        "pools": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
        "server": {"port": free_port()},
    }
    server = Server(twinpool("cluster-scaled", config, log_dir), log_dir)
    try:
        server.wait_until_healthy()
        with streaming(server, model_path) as streams:
            assert order(server, "scale", "decode", "4") == "the decode pool has 4 workers"
            assert order(server, "scale", "decode", "4") == "the decode pool has 4 workers"
            assert pool(server, "decode") == ["decode-0", "decode-1", "decode-2", "decode-3"]
            order(server, "role", "prefill-1", "decode")
            order(server, "scale", "prefill", "3")
            assert pool(server, "prefill") == ["prefill-0", "prefill-2", "prefill-3"]
            order(server, "scale", "decode", "1")
            (stays,) = pool(server, "decode")
            order(server, "scale", "decode", "2")
            assert pool(server, "decode") == [stays, "decode-4"]
            order(server, "drain", stays)
            order(server, "scale", "decode", "1")
            assert pool(server, "decode") == ["decode-4"]
            order(server, "scale", "prefill", "1")
            refused = CliRunner().invoke(app, ["scale", "decode", "0", "--url", server.url])
            assert refused.exit_code == 1
            assert "leave at least one" in refused.output
        assert streams.wrong == []
        assert streams.num_right > 3 * CLIENTS
        seen = counters(server.url)
        assert seen["twinpool_workers_alive"] == 2
        shown = {name for name in seen if name.startswith("twinpool_worker_requests{")}
        assert len({name.partition('worker="')[2].partition('"')[0] for name in shown}) == 2
        assert seen.get("twinpool_requests_failed_total", 0) == 0
        assert seen.get("twinpool_replacements_total", 0) == seen.get("twinpool_migrations_total", 0) == 0
    finally:
        server.stop()
    assert wait_for_no_process(server.mark, 2.0) == {}
