"""Starting can fail or be interrupted at any moment, and nothing is left behind."""

import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lab.launches import TWINPOOL, twinpool
from lab.server_process import REPOSITORY, Server, free_port, wait_for_no_process
from tests.engine.servers import cluster_config

pytestmark = pytest.mark.timeout(180)

LEAVES_WITHIN_S = 20.0


@pytest.mark.parametrize("after_s", [0.3, 2.0, 8.0, 16.0])
def test_ctrl_c_during_the_start_leaves_no_process(after_s: float, model_path: str, log_dir: Path) -> None:
    config = cluster_config(model_path, free_port())
    server = Server(twinpool(f"interrupted-{after_s}", config, log_dir), log_dir)
    try:
        time.sleep(after_s)
        assert server.process.poll() is None, server.log()[-2000:]
        server.interrupt()
        code = server.process.wait(LEAVES_WITHIN_S)
        assert wait_for_no_process(server.mark, 2.0) == {}
        assert code in (0, 130, -2), server.log()[-2000:]
        assert "Traceback" not in server.log()
    finally:
        server.kill()


def _refused(config: dict[str, Any], name: str, log_dir: Path) -> str:
    """Everything the refused start said. Fails if it did not exit with an error, or left a process."""
    server = Server(twinpool(name, config, log_dir), log_dir)
    try:
        code = server.process.wait(120)
        assert wait_for_no_process(server.mark, 2.0) == {}
        said = server.log()
        assert code not in (0, None), said
        assert "Traceback" not in said
        return said
    finally:
        server.kill()


def test_unknown_field_is_named(model_path: str, log_dir: Path) -> None:
    config = cluster_config(model_path, free_port(), transfer={"lnks": ["host"]})
    said = _refused(config, "unknown-field", log_dir)
    assert "transfer.lnks" in said
    assert "links" in said, "the remedy: what it is called"


def test_unknown_engine_option_is_named(model_path: str, log_dir: Path) -> None:
    config = cluster_config(model_path, free_port())
    config["engine"]["max_model_length"] = 100
    said = _refused(config, "unknown-engine-option", log_dir)
    assert "max_model_length" in said
    assert "max_model_len" in said.replace("max_model_length", "")


def test_unknown_frontend_flag_is_named(model_path: str, log_dir: Path) -> None:
    config = cluster_config(model_path, free_port())
    config["server"]["options"]["enable_auto_tool_choise"] = True
    assert "enable_auto_tool_choise" in _refused(config, "unknown-flag", log_dir)


def test_taken_port_is_named(model_path: str, log_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = _refused(cluster_config(model_path, port), "port-taken", log_dir)
    assert "server.port" in said
    assert str(port) in said


def test_missing_model_path_is_named(log_dir: Path) -> None:
    said = _refused(cluster_config("/no/such/model", free_port()), "no-model", log_dir)
    assert "model" in said
    assert "/no/such/model" in said


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_too_small_kv_memory_is_named(pool: str, model_path: str, log_dir: Path) -> None:
    config = cluster_config(model_path, free_port())
    config["pools"][pool]["engine"] = {"kv_cache_memory_bytes": 8 << 20}
    said = _refused(config, f"small-{pool}-kv", log_dir)
    assert "kv_cache_memory_bytes" in said
    assert pool in said


def test_block_size_the_backend_refuses_is_named(model_path: str, log_dir: Path) -> None:
    config = cluster_config(model_path, free_port())
    config["engine"]["block_size"] = 48
    said = _refused(config, "block-size", log_dir)
    assert "block_size" in said
    assert "48" in said
    assert "32" in said, "the remedy: multiples of 32"


def test_config_check_says_the_same_without_starting(model_path: str, log_dir: Path) -> None:
    launch = twinpool("checked", cluster_config(model_path, free_port(), transfer={"lnks": ["host"]}), log_dir)
    checked = subprocess.run(
        [*TWINPOOL, "config", "check", launch.command[-1]],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert checked.returncode != 0
    assert "transfer.lnks" in checked.stdout + checked.stderr
