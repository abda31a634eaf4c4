import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.status import BlockCounts, ClassStatus, ClusterStatus, LastRequest, LinkStatus, WorkerStatus
from cluster.terminal import commands, lab_commands
from lab.load.command import LoadOptions
from lab.traces.trace import Scaling

STATUS = ClusterStatus(
    model="smollm2",
    requests_running=3,
    requests_waiting=1,
    workers=[
        WorkerStatus(
            "prefill-0",
            "prefill",
            "ready",
            blocks=BlockCounts(100, 60, 30, 10),
            exports_open=2,
            leases={"computing": 2, "held": 0},
        ),
        WorkerStatus("decode-0", "decode", "dead", cause="killed by SIGKILL", transfer_failures={"checksum": 4}),
    ],
    links=[LinkStatus("host", 5_400_000_000, 1.0)],
    transfers={"loaded": 7},
    transfer_failures={"peer_lost": 1},
    last_request=LastRequest(1500, 1.23, 0.0045, 34_500_000, "host", "loaded"),
    classes=[ClassStatus("gold", 0.5, 0.05, {"attained": 88, "missed_ttft": 5, "missed_both": 7, "aborted": 9})],
)


class Handler(BaseHTTPRequestHandler):
    """Answers with STATUS to whoever has the key."""

    def do_GET(self) -> None:
        allowed = self.path == "/twinpool/status" and self.headers.get("Authorization") in (None, "Bearer sesame")
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(msgspec.json.encode(STATUS) if allowed else b"no")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(commands.app, list(arguments), env={"COLUMNS": "200", "TWINPOOL_API_KEY": ""})
    return result.exit_code, result.stdout, result.stderr


def test_status_shows_pools_blocks_links_and_the_last_hand_over(url: str) -> None:
    code, out, _ = invoke("status", "--url", url)
    assert code == 0
    for expected in ("prefill-0", "ready", "60", "10", "2 out", "killed by SIGKILL", "5.40 GB/s", "7 loaded"):
        assert expected in out, out
    assert "hand-off 4.5 ms" in out
    assert "1 x peer_lost" in out
    assert "prefill-0 holds leases: 2 x computing\n" in out
    assert "decode-0 saw transfers fail: 4 x checksum\n" in out
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("gold"))
    # Requests, attained of those that did not leave, late, uneven, rejected, failed, left.
    assert row == ["gold", "0.5", "s,", "50", "ms", "109", "88.0%", "12", "7", "0", "0", "9"]


def test_status_as_json_is_the_answer_as_it_is(url: str) -> None:
    code, out, _ = invoke("status", "--url", f"{url}/", "--json", "--api-key", "sesame")
    assert code == 0
    assert json.loads(out) == msgspec.to_builtins(STATUS)


def test_status_of_nobody_names_the_address_and_the_remedy() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code, _, err = invoke("status", "--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert f"127.0.0.1:{port}/twinpool/status" in err
    assert "--url" in err


def test_a_wrong_key_is_reported(url: str) -> None:
    code, _, err = invoke("status", "--url", url, "--api-key", "wrong")
    assert code == 1
    assert "Unauthorized" in err


def test_config_check_shows_the_workers(free_port: int) -> None:
    code, out, err = invoke("config", "check", f"server.port={free_port}", "pools.decode.replicas=2")
    assert code == 0, err
    assert all(worker in out for worker in ("prefill-0", "decode-0", "decode-1"))


def test_config_check_names_every_problem_and_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: {decode: {replica: 2}}\nslo: {ttft_s: -1}\n")
    code, out, err = invoke("config", "check", str(path))
    assert code == 2
    assert out == ""
    assert "pools.decode.replica: unknown field" in err
    assert "slo.ttft_s: found -1" in err


def test_a_missing_model_is_named(free_port: int) -> None:
    code, _, err = invoke("config", "check", "model=/no/such/model", f"server.port={free_port}")
    assert code == 2
    assert "/no/such/model does not exist" in err
    code, _, err = invoke("serve", "model=/no/such/model", "server.prt=1")
    assert code == 2
    assert "server.prt" in err


def test_two_files_are_one_too_many(tmp_path: Path) -> None:
    code, _, err = invoke("config", "check", "a.yaml", "b.yaml")
    assert code == 2
    assert "one configuration file" in err


def test_serve_passes_the_configuration_to_the_composition_root(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []

    def run_serve(config: Any, *, demo: bool, verbose: bool) -> int:
        calls.append((config.server.port, demo))
        return 7

    monkeypatch.setattr(commands, "_load_entry", {commands.SERVE_ENTRY: run_serve}.__getitem__)
    code, _, _ = invoke("serve", "--demo", "--port", "1234", "server.port=1")
    assert code == 7
    assert calls == [(1234, True)]


def test_what_is_named_by_a_string_exists() -> None:
    assert callable(commands._load_entry(commands.SERVE_ENTRY))
    for entry in [value for name, value in vars(lab_commands).items() if name.endswith(("_ENTRY", "_OPTIONS"))]:
        assert callable(lab_commands._load(entry))


def test_lab_links_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def run_links(**options: Any) -> int:
        calls.append(options)
        return 3

    monkeypatch.setattr(lab_commands, "_load", {lab_commands.LINKS_ENTRY: run_links}.__getitem__)
    code, _, _ = invoke("lab", "links", "--quick", "--json", "links.json", "--large-gib", "4")
    assert code == 3
    assert calls == [{"quick": True, "large_gib": 4.0, "json_file": Path("links.json"), "plot_file": None}]


def test_lab_load_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[LoadOptions] = []

    def run_load(options: LoadOptions) -> int:
        calls.append(options)
        return 1

    entries = {lab_commands.LOAD_ENTRY: run_load, lab_commands.LOAD_OPTIONS: LoadOptions, lab_commands.SCALING: Scaling}
    monkeypatch.setattr(lab_commands, "_load", entries.__getitem__)
    code, _, _ = invoke("lab", "load", "http://there", "-w", "a=1/s,2+3", "--process", "gamma", "--seed", "9")
    assert code == 1
    (options,) = calls
    assert (options.url, list(options.work), options.process, options.seed) == (
        "http://there",
        ["a=1/s,2+3"],
        "gamma",
        9,
    )


LIGHT = [["--help"], ["serve", "--help"], ["lab", "links", "--help"], ["config", "check"], ["status"]]
RUN_ALL = """
import json, sys
from cluster.cli import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv[:] = ["twinpool", *arguments]
    try:
        main()
    except SystemExit:
        pass
    if heavy := {"torch", "vllm", "transformers"} & set(sys.modules):
        sys.exit(f"{arguments} imports {heavy}")
"""


def test_no_command_but_serve_imports_torch_or_vllm() -> None:
    command = [sys.executable, "-c", RUN_ALL, json.dumps(LIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 3


def test_version_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = invoke("version")
    assert code == 0
    assert "vllm" in out
