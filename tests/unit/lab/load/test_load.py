"""`twinpool lab load` against a server of a few lines on a real socket."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from click.testing import Result
from typer.testing import CliRunner

from cluster.terminal.commands import app
from lab.load.client import Record
from lab.server_process import free_port

STEP_S = 0.004
TOKENIZER = "tokenizer.json"


class FakeServer:
    """Answers with as many tokens as it is asked for; the sets say what becomes of requests by number, midway."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.refuse: set[int] = set()
        self.cut: set[int] = set()
        self.drop: set[int] = set()
        """The connection breaks."""
        self.stall: set[int] = set()
        self.shorten: set[int] = set()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(letter) for letter in (await request.json())["prompt"]]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if number in self.refuse:
            return web.json_response({"error": {"message": "full"}}, status=503)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for index in range(body["max_tokens"]):
            if number in self.cut and index == 1:
                await answer.write(b'data: {"error": {"message": "a worker died"}}\n\n')
                return answer
            if number in self.drop and index == 1:
                assert request.transport is not None
                request.transport.abort()
                return answer
            if number in self.stall and index == 1:
                await asyncio.Event().wait()
            if number in self.shorten and index == 1:
                await answer.write(b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n')
                return answer
            await answer.write(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % index)
            choice = {"text": "x", "token_ids": [7], "finish_reason": None}
            await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await asyncio.sleep(STEP_S)
        usage = {"completion_tokens": body["max_tokens"]}
        await answer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return answer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


def load(server: FakeServer, *arguments: str) -> Result:
    """In this process: importing everything takes a new one a second."""
    return CliRunner().invoke(app, ["lab", "load", server.url, *arguments], env={"COLUMNS": "200"})


def test_every_request_is_measured_at_the_client(server: FakeServer, tmp_path: Path) -> None:
    server.refuse, server.cut = {1}, {2}
    lines, report = tmp_path / "records.jsonl", tmp_path / "summary.json"
    done = load(
        server, "-w", "chat=20/s,12+5,ttft=2,itl=1", "--seconds", "0.5", "--class-header", "X-Slo-Class",
        "--jsonl", str(lines), "--json", str(report),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    records = [msgspec.json.decode(line, type=Record) for line in lines.read_bytes().splitlines()]
    summary = json.loads(report.read_text())["summary"]["total"]
    assert summary["offered"] == len(records) == len(server.bodies)
    assert summary["whole"] == summary["good"] == len(records) - 2
    assert summary["rejected"] == 1
    whole = next(record for record in records if not record.error)
    assert (whole.tokens, len(whole.gaps_s), whole.text) == (5, 4, "xxxxx")
    assert sum(whole.gaps_s) > 2 * STEP_S
    assert {len(body["prompt"]) for body in server.bodies} == {12}
    assert {headers["X-Slo-Class"] for headers in server.headers} == {"chat"}
    assert "a worker died" in done.stdout


def test_what_breaks_stalls_or_ends_early_is_recorded_as_it_was(server: FakeServer, tmp_path: Path) -> None:
    server.drop, server.stall, server.shorten = {0}, {1}, {2}
    lines = tmp_path / "records.jsonl"
    arguments = ("-w", "chat=8/s,12+5,ttft=9,itl=9", "--process", "even", "--seconds", "0.6", "--timeout-s", "1")
    done = load(server, *arguments, "--jsonl", str(lines))
    assert done.exit_code == 0, done.stderr
    records = [msgspec.json.decode(line, type=Record) for line in lines.read_bytes().splitlines()]
    dropped, stalled, short, whole = sorted(records, key=lambda record: record.sent_s)
    assert "Error" in dropped.error
    assert stalled.error == "no end within 1 s"
    assert stalled.end_to_end_s >= 1
    assert short.error == "1 tokens of 5"
    assert not whole.error
    # Events that hold only usage are no tokens and make no gaps.
    assert (whole.tokens, len(whole.gaps_s)) == (5, 4)
    assert all(record.ttft_s is not None and record.gaps_s == [] for record in (dropped, stalled, short))
    assert "25.0 %" in done.stdout


def test_a_later_turn_repeats_what_was_said(server: FakeServer, tmp_path: Path) -> None:
    lines = tmp_path / "records.jsonl"
    done = load(server, "-w", "talk=9/s,40+3,turns=3,think=0", "--seconds", "0.3", "--jsonl", str(lines))
    assert done.exit_code == 0, done.stderr
    by_session: dict[tuple[int, ...], list[list[int]]] = {}
    for body in server.bodies:
        by_session.setdefault(tuple(body["prompt"][:40]), []).append(body["prompt"])
    assert by_session
    for prompts in by_session.values():
        first, second, third = prompts
        assert second[:43] == [*first, 7, 7, 7]
        assert third[: len(second) + 3] == [*second, 7, 7, 7]
    lengths = [msgspec.json.decode(line, type=Record).prompt_tokens for line in lines.read_bytes().splitlines()]
    assert sorted(set(lengths)) == [40, 83, 126]


def test_ctrl_c_keeps_what_was_measured(server: FakeServer, tmp_path: Path) -> None:
    lines = tmp_path / "records.jsonl"
    command = [
        *(sys.executable, "-c", "from cluster.cli import main; main()", "lab", "load", server.url),
        *("-w", "chat=30/s,12+5", "--seconds", "60", "--jsonl", str(lines)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        until_s = time.monotonic() + 20
        while not (lines.exists() and lines.read_bytes().count(b"\n") > 3):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=10)
    assert running.returncode == 130, err
    assert "offered" in out


def test_what_is_wrong_is_said_in_a_sentence(server: FakeServer) -> None:
    done = load(server, "-w", "chat=1,12+5")
    assert done.exit_code == 2
    assert "the form is" in done.stderr


def test_a_summary_that_cannot_be_written_is_said_before_the_first_request(server: FakeServer, tmp_path: Path) -> None:
    done = load(server, "-w", "chat=9/s,12+5", "--seconds", "0.3", "--json", str(tmp_path / "none" / "x.json"))
    assert done.exit_code == 2
    assert "does not exist" in done.stderr
    done = load(server, "-w", "chat=9/s,12+5", "--seconds", "0.3", "--json", str(tmp_path))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
    assert server.bodies == []


def test_a_trace_is_replayed_with_what_its_prompts_share(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 40 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i + 1]} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = load(server, "--trace", str(trace), "--lengths", "0.1", "--ttft", "2", "--itl", "1")
    assert done.exit_code == 0, done.stderr
    assert "100.0 %" in done.stdout
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [60] * 4
    assert len({tuple(prompt[:51]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) > 1


def test_work_and_trace_are_not_both_given(server: FakeServer) -> None:
    assert "not both" in load(server).stderr
