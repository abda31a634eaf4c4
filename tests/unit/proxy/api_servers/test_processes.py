"""How further API server processes are started."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.launch.local import WorkerCommand
from proxy.api_servers import messages
from proxy.api_servers.accept_loads import NOT_ACCEPTING, open_loads
from proxy.api_servers.process import EXIT_FAILED, ApiServerProcess
from proxy.api_servers.settings import (
    ApiServerSettingsError,
    api_server_commands,
    loads_path,
    metrics_dir,
    read_api_server_settings,
)
from proxy.slo.rules import SloRules


def commands(directory: Path, api_servers: int) -> list[WorkerCommand]:
    config = ClusterConfig.model_validate({"server": {"api_servers": api_servers, "options": {"api_key": "secret"}}})
    with socket.socket() as listening:
        return api_server_commands(config, "a/model", directory, listening, {"HOME": "/root"})


def test_one_api_server_needs_no_further_process(tmp_path: Path) -> None:
    assert commands(tmp_path, 1) == []
    assert list(tmp_path.iterdir()) == []


def test_every_further_process_inherits_the_socket_and_finds_its_settings(tmp_path: Path) -> None:
    first, second = commands(tmp_path, 3)
    assert (first.worker_id, second.worker_id) == ("api-server-1", "api-server-2")
    settings = read_api_server_settings(Path(second.argv[-1]))
    assert second.pass_fds == (settings.listening_fd,)
    assert (settings.index, settings.model, settings.config.server.api_servers) == (2, "a/model", 3)
    assert second.env == {"HOME": "/root", "PROMETHEUS_MULTIPROC_DIR": str(metrics_dir(tmp_path))}
    assert Path(second.argv[-1]).stat().st_mode & 0o777 == 0o600, "the API key is in it"


def test_settings_that_do_not_fit_are_described_without_the_keys_in_them(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    class_of = {"api_keys": ["hunter2"], "unheard_of": 1}
    path.write_text(json.dumps({"config": {"slo": {"classes": {"a": class_of}}, "server": [{"api_key": "hunter2"}]}}))
    with pytest.raises(ApiServerSettingsError, match=r"config\.slo\.classes\.a\.unheard_of: Extra inputs") as caught:
        read_api_server_settings(path)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_further_process_is_told_which_key_belongs_to_which_class(tmp_path: Path) -> None:
    classes = {name: {"api_keys": [f"key-{name}"]} for name in ("gold", "batch")}
    config = ClusterConfig.model_validate({"server": {"api_servers": 2}, "slo": {"classes": classes}})
    with socket.socket() as listening:
        (command,) = api_server_commands(config, "a/model", tmp_path, listening, {})
    told = read_api_server_settings(Path(command.argv[-1]))
    assert told.config == config
    assert SloRules(told.config.slo).standing(api_key="key-gold").slo.name == "gold"
    assert "key-gold" not in told.model_dump_json() + repr(told) + str(told.model_dump())


def test_connections_are_counted_where_all_processes_see_them(tmp_path: Path) -> None:
    commands(tmp_path, 3)
    mine, theirs = open_loads(loads_path(tmp_path)), open_loads(loads_path(tmp_path))
    assert list(mine) == [NOT_ACCEPTING] * 3
    mine[1] = 5
    assert theirs[1] == 5


def test_settings_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(ApiServerSettingsError, match="No such file"):
        read_api_server_settings(path)
    path.write_text('{"name": "x"}')
    with pytest.raises(ApiServerSettingsError, match="same installation"):
        read_api_server_settings(path)


def test_nothing_imports_the_prometheus_client_before_its_directory_is_known() -> None:
    """It reads the variable once, when it is imported."""
    code = "import sys, proxy.serve; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_either_signal_ends_a_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The launcher's watchdog sends SIGINT: to a worker SIGTERM means to finish everything first."""
    process = make_process(tmp_path, monkeypatch)
    running = asyncio.create_task(process.run())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(running, 5) == 0


async def test_a_process_that_was_given_up_leaves_with_a_failure_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = make_process(tmp_path, monkeypatch)
    running = asyncio.create_task(process.run())
    await asyncio.sleep(0)
    process._leave(messages.Leave("nothing was heard of it for 15.0 s"))
    assert await asyncio.wait_for(running, 5) == EXIT_FAILED


def make_process(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ApiServerProcess:
    """One that never gets as far as importing vLLM."""
    (command,) = commands(directory, 2)
    monkeypatch.setattr(ApiServerProcess, "_prepare", lambda _self: time.sleep(0.2))
    return ApiServerProcess(read_api_server_settings(Path(command.argv[-1])))
