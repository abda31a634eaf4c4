"""`twinpool drain`, `role` and `restart` against a server that plays a script."""

import io
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.orders import Accepted, Refusal, RefusalText, RollingStatus
from cluster.status import ClusterStatus, WorkerStatus
from cluster.terminal import commands, worker_commands
from cluster.terminal.status_tables import status_tables
from cluster.terminal.worker_commands import drain_progress, restart_progress, role_progress, scale_progress
from tests.unit.cluster.scripted_server import Answering, serving


def status(*workers: WorkerStatus, rolling: RollingStatus | None = None) -> ClusterStatus:
    return ClusterStatus(model="m", workers=list(workers), rolling_restart=rolling)


def decode_1(state: str, **fields: Any) -> WorkerStatus:
    return WorkerStatus("decode-1", fields.pop("role", "decode"), state, **fields)


class Script(HTTPServer):
    """What the server answers to orders, and its statuses in turn; it stays with the last one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: tuple[int, Accepted | Refusal] = (202, Accepted("on its way", ["decode-1"], 5.0))
        self.statuses = [status()]
        self.orders: list[tuple[str, Any, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(Answering, BaseHTTPRequestHandler):
    server: Script

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.orders.append((self.path, body, self.headers.get("Authorization", "")))
        self.answer(*self.server.reply)

    def do_GET(self) -> None:
        self.answer_in_turn(self.server.statuses)


@pytest.fixture(scope="module")
def server() -> Iterator[Script]:
    script = Script()
    with serving(script):
        yield script


@pytest.fixture
def script(server: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(worker_commands, "_LOOK_AGAIN_S", 0.001)
    server.reply, server.orders = (202, Accepted("on its way", ["decode-1"], 5.0)), []
    return server


def invoke(script: Script, *arguments: str) -> tuple[int, str, str]:
    environment = {"COLUMNS": "200", "TWINPOOL_API_KEY": "sesame"}
    result = CliRunner().invoke(commands.app, [*arguments, "--url", script.url], env=environment)
    return result.exit_code, result.stdout, result.stderr


def test_drain_waits_and_shows_what_is_left(script: Script) -> None:
    script.statuses = [
        status(decode_1("draining", running=3, waiting=1, imports_open=2)),
        status(decode_1("draining", running=1)),
        status(decode_1("drained", cause="Worker decode-1 left: drained")),
    ]
    code, out, _ = invoke(script, "drain", "decode-1", "--timeout", "7")
    assert code == 0
    assert "decode-1 has 3 running, 1 waiting, 2 transfers" in out
    assert "decode-1 has 1 running, 0 waiting, 0 transfers" in out
    assert out.endswith("Worker decode-1 left: drained\n")
    order = {"timeout_s": 7.0, "force": False}
    assert script.orders == [("/twinpool/workers/decode-1/drain", order, "Bearer sesame")]


def test_without_waiting_it_says_what_was_begun(script: Script) -> None:
    code, out, _ = invoke(script, "role", "decode-1", "prefill", "--no-wait", "--force")
    assert (code, "on its way" in out, "twinpool status" in out) == (0, True, True)
    order = {"role": "prefill", "timeout_s": None, "force": True}
    assert script.orders[0][:2] == ("/twinpool/workers/decode-1/role", order)


def test_a_refusal_is_told_as_it_is(script: Script) -> None:
    script.reply = (409, Refusal(RefusalText("worker decode-1 is the last decode worker", 409)))
    code, _, err = invoke(script, "drain", "decode-1")
    assert (code, err) == (1, "twinpool: worker decode-1 is the last decode worker\n")


def test_what_is_not_done_in_time_is_a_failure(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_commands, "_MARGIN_S", 0.0)
    script.reply = (202, Accepted("on its way", ["decode-1"], 0.0))
    script.statuses = [status(decode_1("draining", running=1))]
    code, _, err = invoke(script, "drain", "decode-1")
    assert code == 1
    assert "not done in time: decode-1 has 1 running" in err


def test_restart_shows_whose_turn_it_is(script: Script) -> None:
    both = ["decode-0", "decode-1"]
    script.statuses = [
        status(decode_1("draining", running=2), rolling=RollingStatus(both, ["decode-0"], "decode-1")),
        status(decode_1("starting"), rolling=RollingStatus(both, ["decode-0"], "decode-1")),
        status(decode_1("ready"), rolling=RollingStatus(both, both)),
    ]
    code, out, _ = invoke(script, "restart", "decode")
    assert code == 0
    assert "1 of 2 started again; decode-1 has 2 running" in out
    assert "1 of 2 started again; decode-1 starts" in out
    assert out.endswith("started again: decode-0, decode-1\n")
    assert script.orders[0][:2] == ("/twinpool/restart", {"workers": "decode", "timeout_s": None, "force": False})


def test_nobody_there_names_the_address_and_the_remedy(free_port: int) -> None:
    result = CliRunner().invoke(commands.app, ["drain", "decode-1", "--url", f"http://127.0.0.1:{free_port}"])
    assert result.exit_code == 1
    assert f"no answer from http://127.0.0.1:{free_port}/twinpool/workers/decode-1/drain" in result.stderr


def test_somebody_who_speaks_no_http_is_told_like_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:

        def talk() -> None:
            with listening.accept()[0] as other:
                other.recv(1 << 16)
                other.sendall(b"220 mail.example.org\r\n")

        talking = thread.submit(talk)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        result = CliRunner().invoke(commands.app, ["drain", "decode-1", "--url", url])
        talking.result(10)
    assert result.exit_code == 1
    assert f"no answer from {url}/twinpool/workers/decode-1/drain: 220 mail.example.org" in result.stderr


@pytest.mark.parametrize(
    ("state", "drain", "role"),
    [
        ("draining", "", ""),
        ("drained", "done", "failed"),
        ("ready", "failed", "failed"),
        ("dead", "failed", "failed"),
        ("starting", "failed", "failed"),
    ],
)
def test_every_state_of_a_worker_means_something(state: str, drain: str, role: str) -> None:
    now = status(decode_1(state, cause="why"))
    assert drain_progress(now, "decode-1").outcome == drain
    assert role_progress(now, "decode-1", "prefill").outcome == role
    assert role_progress(status(decode_1("ready", role="prefill")), "decode-1", "prefill").outcome == "done"
    assert drain_progress(status(), "decode-1").outcome == "failed"
    assert role_progress(status(), "decode-1", "prefill").outcome == "failed"


def test_a_restart_that_stopped_says_why_and_how_far_it_came() -> None:
    failed = restart_progress(status(rolling=RollingStatus(["a", "b"], ["a"], "", "b did not come up")))
    assert (failed.outcome, failed.text) == ("failed", "b did not come up; done before: a")
    assert restart_progress(status()).outcome == "failed"


def test_the_status_shows_who_drains_who_changed_its_role_and_who_is_started_again() -> None:
    text = io.StringIO()
    workers = [
        WorkerStatus("prefill-0", "decode", "ready", starts=2),
        WorkerStatus("prefill-1", "prefill", "draining", drains_to="decode"),
        WorkerStatus("decode-0", "decode", "starting", "it was killed", note="it is started again in 3 s"),
    ]
    Console(file=text, width=100).print(status_tables(status(*workers)))
    for line in (
        "ready, decode",
        "prefill-0 was started again 2 times",
        "prefill-1 finishes what it has, then serves as decode",
        "decode-0: it was killed; it is started again in 3 s",
    ):
        assert line in text.getvalue()


def test_scale_waits_until_the_pool_has_its_workers_and_no_others(script: Script) -> None:
    script.statuses = [
        status(decode_1("ready"), WorkerStatus("decode-2", "decode", "starting")),
        status(decode_1("ready"), WorkerStatus("decode-2", "decode", "ready")),
    ]
    code, out, _ = invoke(script, "scale", "decode", "2")
    assert (code, out.splitlines()) == (
        0,
        ["1 of 2 decode workers are ready; decode-2 starting", "the decode pool has 2 workers"],
    )
    assert script.orders[0][:2] == ("/admin/scale", {"pool": "decode", "replicas": 2, "timeout_s": None})


def test_scale_says_which_worker_did_not_come_up() -> None:
    dead = WorkerStatus("decode-2", "decode", "dead", cause="worker decode-2 was killed by SIGKILL")
    progress = scale_progress(status(decode_1("ready"), dead), "decode", 2)
    assert (progress.outcome, "decode-2: worker decode-2 was killed" in progress.text) == ("failed", True)
    leaving = scale_progress(status(decode_1("ready"), WorkerStatus("decode-2", "decode", "draining")), "decode", 1)
    assert (leaving.outcome, "decode-2 has 0 running" in leaving.text) == ("", True)
