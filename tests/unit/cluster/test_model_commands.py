"""`twinpool model` against a server that plays a script; `serve` and `config check` with a file about models."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.models.messages import ModelList, ModelRemoval, ModelStatus
from cluster.models.models_file import Models
from cluster.orders import Refusal, RefusalText
from cluster.terminal import commands, model_commands
from tests.unit.cluster.scripted_server import Answering, serving


class Script(HTTPServer):
    """What the server answers to orders, and its lists in turn; it stays with the last one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: tuple[int, Any] = (200, None)
        self.lists = [ModelList([])]
        self.orders: list[tuple[str, str, Any, str]] = []


class Handler(Answering, BaseHTTPRequestHandler):
    server: Script

    def do_POST(self) -> None:
        self._take_order()

    def do_DELETE(self) -> None:
        self._take_order()

    def _take_order(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        order = msgspec.json.decode(body) if body else None
        self.server.orders.append((self.command, self.path, order, self.headers.get("Authorization", "")))
        self.answer(*self.server.reply)

    def do_GET(self) -> None:
        self.answer_in_turn(self.server.lists)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(model_commands, "_LOOK_AGAIN_S", 0.01)
    server = Script()
    with serving(server):
        yield server


def run(script: Script | None, *arguments: str) -> tuple[int, str]:
    where = ["--url", f"http://127.0.0.1:{script.server_port}", "--api-key", "k"] if script is not None else []
    result = CliRunner().invoke(commands.app, [*arguments, *where])
    return result.exit_code, " ".join(result.output.split())


def status(state: str, **fields: Any) -> ModelStatus:
    return ModelStatus("a", fields.pop("policy", "pinned"), state, **fields)


def test_adding_sends_the_cluster_and_waits_until_the_model_is_up(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: /m\n")
    script.reply = (201, status("starting"))
    script.lists = [ModelList([status("starting")]), ModelList([status("up")])]
    code, output = run(script, "model", "add", "a", str(file), "slo.ttft_s=1", "--set", "cost=2")
    assert (code, output) == (0, "a is up")
    body = {"name": "a", "policy": "pinned", "cluster": {"model": "/m", "slo": {"ttft_s": 1}}, "cost": 2}
    assert script.orders == [("POST", "/admin/models", body, "Bearer k")]


def test_adding_a_model_on_demand_does_not_wait(script: Script) -> None:
    script.reply = (201, status("down", policy="on_demand"))
    assert run(script, "model", "add", "a", "--policy", "on_demand") == (0, "a is down")


def test_a_model_that_does_not_come_up_is_a_failure_with_its_cause(script: Script) -> None:
    script.reply = (201, status("starting"))
    script.lists = [ModelList([status("down", cause="no such directory")])]
    code, output = run(script, "model", "add", "a")
    assert (code, output) == (1, "twinpool: a did not come up, and is tried again: no such directory")


def test_a_model_that_is_not_up_in_time_is_a_failure(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_commands, "_START_LIMIT_S", 0.0)
    script.reply = (201, status("starting"))
    code, output = run(script, "model", "add", "a", "model=/m")
    assert (code, "a is not up after 0 s: starting" in output) == (1, True)


def test_a_refusal_is_told(script: Script) -> None:
    script.reply = (409, Refusal(RefusalText("the model a is there already", 409)))
    assert run(script, "model", "add", "a") == (1, "twinpool: the model a is there already")


def test_removing_waits_until_nothing_is_left(script: Script) -> None:
    script.reply = (202, ModelRemoval("a", 5.0))
    script.lists = [ModelList([status("draining", running=2)]), ModelList([status("stopping")]), ModelList([])]
    assert run(script, "model", "remove", "org/a", "--timeout", "5") == (0, "org/a is removed")
    script.lists = [ModelList([])]
    assert script.orders == [("DELETE", "/admin/models/org/a?timeout_s=5.0", None, "Bearer k")]


def test_the_list_shows_state_requests_and_room(script: Script) -> None:
    script.lists = [ModelList([status("up", running=3, cost=2, aliases=["a-batch"])], capacity=4, used=2)]
    code, output = run(script, "model", "list")
    assert code == 0
    for text in ("a, a-batch", "pinned", "up", "2 of 4 in use"):
        assert text in output
    assert '"used": 2' in run(script, "model", "list", "--json")[1]


def test_a_cause_with_brackets_is_shown_as_it_is(script: Script) -> None:
    script.lists = [ModelList([status("down", cause="[/m]")])]
    code, output = run(script, "model", "list")
    assert (code, "[/m]" in output) == (0, True)


def test_serve_takes_a_file_about_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[Models] = []

    def entry(_name: str) -> Any:
        return lambda models, verbose: served.append(models) or 0  # type: ignore[func-returns-value]

    monkeypatch.setattr(commands, "_load_entry", entry)
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {cluster: {engine: simulated}}}\n")
    assert run(None, "serve", str(file), "--port", "9001")[0] == 0
    assert served[0].config.server.port == 9001
    code, output = run(None, "serve", str(file), "--demo")
    assert (code, "--demo" in output) == (2, True)


def test_config_check_shows_the_workers_of_every_model(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {cluster: {engine: simulated}}, b: {cluster: {engine: simulated}, cost: 3}}\n")
    code, output = run(None, "config", "check", str(file))
    assert code == 0
    assert "a (pinned, cost 1)" in output
    assert "b (pinned, cost 3)" in output
    assert output.count("decode-0") == 2


def test_who_adds_or_removes_is_told_what_the_next_start_brings(script: Script) -> None:
    script.reply = (201, status("down", policy="on_demand", kept=False))
    code, output = run(script, "model", "add", "a", "--policy", "on_demand")
    assert (code, "a is forgotten when the server ends; see added_models" in output) == (0, True)
    script.reply = (202, ModelRemoval("a", 5.0, returns=True))
    script.lists = [ModelList([])]
    code, output = run(script, "model", "remove", "a")
    assert (code, output.endswith("comes back with the next start a is removed")) == (0, True)
