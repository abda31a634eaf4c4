"""Starts and stops the servers under test: one plain vLLM server, and a twinpool cluster.

A server runs in a session of its own with a mark in its environment, so that the processes it leaves
behind can be found whatever became of their parents. Only marked processes are ever killed.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "TWINPOOL_TEST_MARK"

BLOCK = 128
CHUNK = 192
"""max_num_batched_tokens: not a multiple of the block size, so that chunks end inside blocks."""
CONTEXT = 2048

ENGINE_OPTIONS: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 32,
    "block_size": BLOCK,
    "dtype": "bfloat16",
    "seed": 0,
    "enforce_eager": True,  # starts in 30 s instead of 80 s; a decode step costs 34 ms instead of 29 ms
}
FRONTEND_FLAGS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prompt_tokens_details": True,
}
PREFILL_BLOCKS = 24
"""Room for one and a half prompts of the longest kind: two long ones push everything else out of P's cache."""
DECODE_BLOCKS = 320
MODEL_NAME = "smollm2"
START_DEADLINE_S = 240.0
REQUEST_DEADLINE_S = 60.0


class ServerFailed(Exception):
    """A server under test did not start; the message ends with its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def marked_processes(mark: str) -> dict[int, str]:
    """Live processes started under this mark: pid to command line. Zombies do not count."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                # vLLM renames its processes, `VLLM::Worker`; arguments are separated by NUL.
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return found


def wait_for_no_process(mark: str, deadline_s: float) -> dict[int, str]:
    """Waits until every process of a mark is gone; returns those that are still there at the deadline."""
    until = time.monotonic() + deadline_s
    while (left := marked_processes(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


@dataclass(frozen=True)
class Launch:
    """How to start one server."""

    name: str
    command: Sequence[str]
    port: int
    env: Mapping[str, str]
    api_key: str = "none"


class Server:
    """One server process and everything it starts."""

    def __init__(self, launch: Launch, log_dir: Path) -> None:
        self.name = launch.name
        self.url = f"http://127.0.0.1:{launch.port}"
        self.port = launch.port
        self.api_key = launch.api_key
        self.mark = uuid.uuid4().hex
        self.log_path = log_dir / f"{launch.name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                launch.command,
                cwd=REPOSITORY,
                env={**os.environ, **launch.env, "PYTHONPATH": str(REPOSITORY), MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def http(self) -> httpx.Client:
        """A client that presents the API key."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        return httpx.Client(base_url=self.url, timeout=REQUEST_DEADLINE_S, headers=headers)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_healthy(self, deadline_s: float = START_DEADLINE_S) -> None:
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.name} exited with {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise ServerFailed(f"{self.name} was not healthy after {deadline_s} s:\n{self.log()[-4000:]}")

    def wait_for_log(self, text: str, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while text not in self.log():
            if self.process.poll() is not None or time.monotonic() > until:
                raise ServerFailed(f"{self.name} never logged {text!r}:\n{self.log()[-4000:]}")
            time.sleep(0.05)

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> dict[int, str]:
        return marked_processes(self.mark)

    def stop(self, deadline_s: float = 30.0) -> None:
        """Asks with SIGTERM; kills what is left, by id."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(deadline_s)
        wait_for_no_process(self.mark, 5.0)
        self.kill()

    def kill(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


def single_vllm(model: str, port: int) -> Launch:
    """The yardstick: one engine behind vLLM's own API server, same engine options, one core."""
    flags = {**ENGINE_OPTIONS, **FRONTEND_FLAGS, "num_gpu_blocks_override": DECODE_BLOCKS}
    arguments = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in flags.items()]
    return Launch(
        name="single-vllm",
        command=[
            sys.executable,
            "-m",
            "vllm.entrypoints.launchers.api_server.entry",
            f"--model={model}",
            f"--served-model-name={MODEL_NAME}",
            "--host=127.0.0.1",
            f"--port={port}",
            *arguments,
        ],
        port=port,
        env={
            "VLLM_CPU_OMP_THREADS_BIND": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def cluster_config(model: str, port: int, **changes: Any) -> dict[str, Any]:
    """1P1D with the yardstick's engine options, every prompt prefilled remotely; `changes` replace top-level keys."""
    config: dict[str, Any] = {
        "model": model,
        "served_model_name": MODEL_NAME,
        "engine": dict(ENGINE_OPTIONS),
        "pools": {
            "prefill": {"engine": {"num_gpu_blocks_override": PREFILL_BLOCKS}},
            "decode": {"engine": {"num_gpu_blocks_override": DECODE_BLOCKS}},
        },
        "scheduling": {"remote_prefill_min_tokens": 1},
        "server": {"port": port, "options": dict(FRONTEND_FLAGS)},
    }
    return {**config, **changes}


def twinpool(name: str, config: Mapping[str, Any], directory: Path) -> Launch:
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    return Launch(
        name=name,
        command=[sys.executable, "-m", "cluster.cli", "serve", str(path)],
        port=config["server"]["port"],
        env={"VLLM_SERVER_DEV_MODE": "1"},
        api_key=config["server"]["options"].get("api_key", "none"),
    )


def reset_prefix_caches(server: Server) -> None:
    """Every engine behind this server forgets its cached prefixes; fails if some blocks are still in use."""
    with server.http() as client:
        client.post("/reset_prefix_cache").raise_for_status()
