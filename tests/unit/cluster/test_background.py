import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
import typer.testing

from cluster.background import record
from cluster.background.record import BackgroundError, Record, began, config_hash, living_record, locked, state_dir
from cluster.preflight.config_file import load_config
from cluster.terminal import background_commands
from cluster.terminal.commands import app
from cluster.terminal.server_calls import CallFailed

SERVER = """
import signal, sys, time
print("not yet", flush=True)
if "served_model_name=bad" in sys.argv:
    sys.exit("the configuration cannot be used")
print("Serving m at URL/v1 (Ctrl-C stops)", flush=True)
time.sleep(600)
"""


class Answers(BaseHTTPRequestHandler):
    """A cluster that has one request when it is asked first."""

    calls: list[str] = []

    def _answer(self, status: int, body: object) -> None:
        self.calls.append(self.path)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_POST(self) -> None:
        self._answer(202, {"message": "closing", "workers": [], "within_s": 0.0})

    def do_GET(self) -> None:
        left = int("/twinpool/status" not in self.calls)
        self._answer(200, {"model": "m", "requests_running": left})

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    Answers.calls = []
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Iterator[Path]:
    """A user whose clusters are `SERVER`; none of them is left."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(background_commands, "COMMAND", (sys.executable, "-c", SERVER.replace("URL", url)))
    yield tmp_path / "twinpool"
    for port in record.living_ports():
        left = living_record(port)
        assert left is not None
        os.kill(left.pid, signal.SIGKILL)
        os.waitpid(left.pid, 0)


def run(*arguments: str) -> tuple[int, str]:
    result = typer.testing.CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def known() -> Record:
    (port,) = record.living_ports()
    found = living_record(port)
    assert found is not None
    return found


def test_up_twice_starts_one_cluster_and_down_twice_stops_it(home: Path, url: str) -> None:
    assert run("up") == (0, f"{url}\n")
    first = known()
    assert run("up") == (0, f"{url}\n")
    assert known() == first
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(record.record_path(8000).stat().st_mode) == 0o600
    assert run("down") == (0, f"{url} is down\n")
    assert Answers.calls == ["/twinpool/close", "/twinpool/status", "/twinpool/status"]
    assert began(first.pid) == ""
    assert run("down") == (0, "nothing is up\n")


def test_up_with_another_configuration_is_refused_while_one_is_up(home: Path, url: str) -> None:
    assert run("up")[0] == 0
    code, said = run("up", "pools.decode.replicas=2")
    assert (code, "another configuration" in said, "twinpool down" in said) == (1, True, True)
    assert run("up", "--port", "8001")[0] == 0
    code, said = run("down", "--now")
    assert (code, "8000, 8001" in said) == (1, True)
    assert run("down", "--now", "--port", "8001") == (0, f"{url} is down\n")
    assert Answers.calls == []


def test_a_cluster_that_does_not_come_up_is_shown_with_the_end_of_its_log(home: Path) -> None:
    code, said = run("up", "served_model_name=bad")
    assert code == 1
    assert "the configuration cannot be used" in said
    assert record.living_ports() == []


def test_a_cluster_that_has_died_is_not_up(home: Path) -> None:
    assert run("up")[0] == 0
    first = known()
    os.kill(first.pid, signal.SIGKILL)
    os.waitpid(first.pid, 0)
    assert run("down") == (0, "nothing is up\n")
    assert run("up")[0] == 0
    assert known().pid != first.pid


def test_another_process_with_the_number_of_a_dead_cluster_is_left_alone(home: Path) -> None:
    state_dir()
    record.write_record(8000, Record(os.getpid(), "0", "", "", "", 0.0, 0.0, 0.0))
    assert run("down", "--now") == (0, "nothing is up\n")


def test_a_process_that_has_the_number_of_one_that_just_ended_gets_no_signal(home: Path) -> None:
    mine = Record(os.getpid(), "0", "", "", "", 0.0, 0.0, 0.0)  # SIGTERM would end the tests
    record.ask_to_end(mine)
    ended = os.spawnv(os.P_NOWAIT, "/bin/true", ("true",))
    os.waitpid(ended, 0)
    record.ask_to_end(msgspec.structs.replace(mine, pid=ended))
    assert not record.lives(msgspec.structs.replace(mine, pid=ended, began="")), "nobody knows when it began"


def test_a_cluster_that_dies_while_it_is_taken_down_is_down(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("up")[0] == 0
    pid = known().pid

    def dies(*_: object) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise CallFailed("no answer")

    monkeypatch.setattr(background_commands, "give_order", dies)
    assert run("down") == (0, f"{url} is down\n")


def test_a_cluster_is_still_up_when_its_log_was_emptied_or_removed(home: Path, url: str) -> None:
    assert run("up")[0] == 0
    record.log_path(8000).write_text("")
    assert run("up") == (0, f"{url}\n")
    record.log_path(8000).unlink()
    assert run("up") == (0, f"{url}\n")


def test_a_cluster_of_which_no_note_can_be_made_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def full(_port: int, made: Record) -> None:
        started.append(made.pid)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background_commands, "write_record", full)
    code, said = run("up")
    assert (code, "No space left" in said) == (1, True)
    assert os.waitpid(started[0], 0)[1] == signal.SIGTERM


def test_two_at_once_do_not_start_two_clusters(home: Path) -> None:
    with locked(8000):
        code, said = run("up")
    assert (code, "another `twinpool up`" in said) == (1, True)


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "twinpool").mkdir(mode=0o777)
    (tmp_path / "twinpool").chmod(0o777)
    with pytest.raises(BackgroundError, match="others may enter"):
        state_dir()


def test_a_configuration_with_another_key_is_another_one() -> None:
    one, same, other = (load_config(None, [f"slo.classes.chat.api_keys={key}"]) for key in ("a", "a", "b"))
    assert config_hash(one) == config_hash(same) != config_hash(other)
