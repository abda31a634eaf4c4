"""A prefill worker on one Ray node and a decode worker on another, whose actor is killed while it streams.

The cluster is in the background meanwhile: `twinpool up` and `twinpool down`.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.simulated.engine.vocabulary import Vocabulary, word_tokens
from lab.launches import TWINPOOL, twinpool
from lab.server_process import MARK, REPOSITORY, Launch, Server, free_port, marked_processes, wait_for_no_process
from tests.engine.observed import counters, status, wait_until, worker

pytestmark = pytest.mark.timeout(150)

PROMPT = [100, *range(100, 400)]
TOKENS = 300


@pytest.fixture
def ray_address(log_dir: Path) -> Iterator[str]:
    """Of a Ray cluster of two nodes; nothing of it is left afterwards."""
    mark = uuid.uuid4().hex
    directory = tempfile.mkdtemp(prefix="ray-")  # the paths of its sockets have to be short
    # Ray notes its address under its default directory too, and fails where that does not exist.
    (Path(directory) / "ray").mkdir()
    with (log_dir / "ray-nodes.log").open("wb") as log:
        nodes = subprocess.Popen(
            (sys.executable, str(Path(__file__).with_name("ray_nodes.py")), directory),
            cwd=REPOSITORY,
            env={
                **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": directory, "XDG_RUNTIME_DIR": directory,
                MARK: mark,
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        address = nodes.stdout.readline().strip()
        assert address, (log_dir / "ray-nodes.log").read_text()[-3000:]
        yield address
    finally:
        nodes.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes.wait(20)
        left = wait_for_no_process(mark, 5.0)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        nodes.kill()
        nodes.wait(5)
        nodes.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)
    assert left == {}


def _config(model_path: str, ray_address: str) -> dict[str, Any]:
    return {
        "model": model_path,
        "engine": "simulated",
        "simulation": {"workers_per_process": 1, "decode_step_s": 0.02},
        "launch": "ray",
        "ray": {
            "address": ray_address,
            "resources": {"prefill": {"for_prefill": 1}, "decode": {"for_decode": 1}},
            "claim_timeout_s": 5,
        },
        "scheduling": {"remote_prefill_min_tokens": 1},
        "server": {"port": free_port()},
    }


def test_what_is_private_in_ray_and_used_is_still_there() -> None:
    """The wish for a node would only be ignored without it, and the rest is imported."""
    code = (
        "import inspect, cluster.ray_launch.ray_driver; from ray.util.placement_group import placement_group; "
        "assert '_soft_target_node_id' in inspect.signature(placement_group).parameters"
    )
    subprocess.run((sys.executable, "-c", code), cwd=REPOSITORY, timeout=60, check=True)


def test_workers_on_two_ray_nodes_serve_and_a_killed_one_comes_back(
    model_path: str, ray_address: str, log_dir: Path
) -> None:
    launch = twinpool("cluster-ray", _config(model_path, ray_address), log_dir)
    mark = uuid.uuid4().hex
    try:
        url = _twinpool(launch, mark, "up", launch.command[-1])
        assert _twinpool(launch, mark, "up", launch.command[-1]) == url
        told = status(url)
        assert [item.state for item in told.workers] == ["ready", "ready"]
        actors = {item.worker_id: _actor_of(item.pid) for item in told.workers}
        nodes = {name: actor.environ()["RAY_RAYLET_PID"] for name, actor in actors.items()}
        assert nodes["prefill-0"] != nodes["decode-0"]
        assert "".join(asyncio.run(_chat(url, told.model))) != ""
        assert counters(url)['twinpool_handovers_total{outcome="loaded"}'] >= 1

        expected = Vocabulary(word_tokens(Path(model_path)), 0).continuation(PROMPT, TOKENS)
        old = worker(url, "decode-0")
        assert asyncio.run(_streams_over_a_kill(url, told.model, actors["decode-0"])) == [expected] * 3
        new = worker(url, "decode-0")
        assert (new.state, new.starts) == ("ready", 1)
        assert new.epoch != old.epoch
        assert not psutil.pid_exists(old.pid), "the old process ends with its actor"

        os.kill(new.pid, signal.SIGKILL)
        wait_until("it is back", lambda: worker(url, "decode-0").starts == 2, 20)
        wait_until("it is ready", lambda: worker(url, "decode-0").state == "ready", 20)
        workers = [item.pid for item in status(url).workers]
        assert _twinpool(launch, mark, "down") == f"{url} is down"
        assert _twinpool(launch, mark, "down") == "nothing is up"
        assert wait_for_no_process(mark, 5.0) == {}
    finally:
        for pid in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not any(psutil.pid_exists(pid) for pid in workers)
    _says_what_ray_lacks(_config(model_path, ray_address), log_dir)


def _twinpool(launch: Launch, mark: str, *arguments: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        (*TWINPOOL, *arguments), cwd=REPOSITORY, env={**os.environ, **launch.env, MARK: mark},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _says_what_ray_lacks(config: dict[str, Any], log_dir: Path) -> None:
    config["ray"] |= {"cpus_per_rank": 3, "claim_timeout_s": 1}
    server = Server(twinpool("ray-lacks", config, log_dir), log_dir)
    try:
        assert server.process.wait(60) == 1
    finally:
        server.kill()
    said = server.log()
    assert "no room for decode-0: 3 CPU and 1 for_decode, on one node" in said
    assert "of 2 CPU free, 1 of 1 for_decode free" in said
    assert "lower ray.cpus_per_rank" in said
    assert "Traceback" not in said
    assert marked_processes(server.mark) == {}


def _actor_of(worker_pid: int) -> psutil.Process:
    keeper = psutil.Process(worker_pid).parent()
    assert keeper is not None
    actor = keeper.parent()
    assert actor is not None
    assert "WorkerActor" in actor.name() + " ".join(actor.cmdline())
    return actor


async def _events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


async def _chat(url: str, model: str) -> list[str]:
    body = {"model": model, "messages": [{"role": "user", "content": "Where are you?"}], "max_tokens": 20}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        events = [event async for event in _events(client, "/v1/chat/completions", body)]
    return [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]


async def _streams_over_a_kill(url: str, model: str, actor: psutil.Process) -> list[list[int]]:
    """The tokens of three streams; the actor is killed when each has got some."""
    under_way = [asyncio.Event() for _ in range(3)]
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(index: int) -> list[int]:
            tokens: list[int] = []
            async for event in _events(client, "/v1/completions", body):
                tokens += event["choices"][0].get("token_ids") or []
                if len(tokens) >= 20:
                    under_way[index].set()
            return tokens

        streams = [asyncio.create_task(one(index)) for index in range(3)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in under_way)), 30)
        actor.kill()
        return list(await asyncio.wait_for(asyncio.gather(*streams), 60))
