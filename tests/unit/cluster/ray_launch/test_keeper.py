import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.preflight.config_file import load_config
from cluster.ray_launch.keeper import settings_on_node, worker_environment
from cluster.ray_launch.leftovers import MARK, end_leftovers, marked
from cluster.ray_launch.messages import Exited, Keep, KeeperSays, NotStarted, RayGroup, Started, WorkerJob
from cluster.simulated.launch import SimulatedPlanner, simulated_commands
from tests.unit.cluster.families import gone_within

NODE_IP = "127.0.0.1"


def job_of(directory: Path, run_id: str, module: str = "cluster.simulated") -> WorkerJob:
    config = load_config(None, ["engine=simulated", "simulation.workers_per_process=1"])
    command = simulated_commands(SimulatedPlanner(config).first(), config, "m", None, directory, {})[-1]
    settings = Path(command.argv[-1]).read_text()
    return WorkerJob(command.worker_id, command.role, command.workers, module, settings, {"MINE": "1"}, run_id)


async def keeper(job: WorkerJob, runtime: Path) -> tuple[asyncio.subprocess.Process, KeeperSays]:
    """A keeper and what it says first."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.ray_launch.keeper"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(Keep(job, NODE_IP)) + b"\n")
    return process, await said(process)


async def said(process: asyncio.subprocess.Process) -> KeeperSays:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    answer: KeeperSays = msgspec.json.decode(line, type=KeeperSays)
    return answer


async def until_marked(pid: int, mark: str) -> None:
    """For a moment after its exec, the kernel shows no environment of a process."""
    async with asyncio.timeout(30):
        while pid not in marked(mark):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


async def test_the_end_of_the_line_ends_the_worker_and_removes_its_directory(tmp_path: Path, runtime: Path) -> None:
    process, first = await keeper(job_of(tmp_path, "run-1"), runtime)
    assert isinstance(first, Started)
    assert first.node_ip == NODE_IP
    (directory,) = runtime.iterdir()
    settings = json.loads((directory / "decode-0.json").read_text())
    assert (settings["runtime_dir"], settings["transfer"]["bind_host"]) == (str(directory), NODE_IP)
    assert (directory / "decode-0.json").stat().st_mode & 0o777 == 0o600
    await until_marked(first.pid, "run-1/decode-0")
    assert process.stdin is not None
    process.stdin.close()
    assert isinstance(await said(process), Exited)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert marked("run-1/decode-0") == []
    assert list(runtime.iterdir()) == []


async def test_an_order_that_cannot_be_read_ends_the_worker(tmp_path: Path, runtime: Path) -> None:
    process, first = await keeper(job_of(tmp_path, "run-unread"), runtime)
    assert isinstance(first, Started)
    assert process.stdin is not None
    process.stdin.write(b"{\n")
    assert isinstance(await said(process), Exited)
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_worker_that_is_killed_is_told_of_with_the_end_of_its_log(tmp_path: Path, runtime: Path) -> None:
    process, first = await keeper(job_of(tmp_path, "run-2"), runtime)
    assert isinstance(first, Started)
    os.kill(first.pid, signal.SIGKILL)
    ended = await said(process)
    assert isinstance(ended, Exited)
    assert (ended.worker_id, ended.returncode) == ("decode-0", -signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert Path(first.log).exists(), "for whoever looks for the cause"


async def test_the_worker_of_a_killed_keeper_ends_and_the_next_keeper_waits_for_that(
    tmp_path: Path, runtime: Path
) -> None:
    process, first = await keeper(job_of(tmp_path, "run-3"), runtime)
    assert isinstance(first, Started)
    await until_marked(first.pid, "run-3/decode-0")
    process.kill()
    await process.wait()
    await end_leftovers("run-3/decode-0")
    assert await gone_within([first.pid], 10)


async def test_leftovers_that_nobody_ends_are_killed() -> None:
    stubborn = await asyncio.create_subprocess_exec("sleep", "100", env={**os.environ, MARK: "run-4/decode-0"})
    await end_leftovers("run-4/decode-0", patience_s=0)
    assert await stubborn.wait() == -signal.SIGKILL


async def test_a_worker_that_cannot_be_started_is_told_of(tmp_path: Path, runtime: Path) -> None:
    process, first = await keeper(msgspec.structs.replace(job_of(tmp_path, "run-5"), worker_id="no/such"), runtime)
    assert isinstance(first, NotStarted)
    assert await asyncio.wait_for(process.wait(), 30) == 0


def test_the_node_decides_directory_and_address(tmp_path: Path) -> None:
    document = json.dumps({"runtime_dir": "/here", "transfer": {"bind_host": "", "beat_s": 5}, "key": "k"})
    assert json.loads(settings_on_node(document, tmp_path, "10.0.0.7")) == {
        "runtime_dir": str(tmp_path),
        "transfer": {"bind_host": "10.0.0.7", "beat_s": 5},
        "key": "k",
    }


def test_of_rays_variables_only_the_gpus_reach_the_worker(tmp_path: Path) -> None:
    here = {"PATH": "/bin", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert worker_environment(here, job_of(tmp_path, "run")) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "MINE": "1",
        MARK: "run/decode-0",
    }


def test_a_worker_whose_ranks_are_anywhere_is_told_where_and_sees_its_nodes_gpus(tmp_path: Path) -> None:
    job = msgspec.structs.replace(job_of(tmp_path, "run"), across_nodes=True)
    settings = json.loads(settings_on_node(job.settings, tmp_path, NODE_IP, RayGroup("10.0.0.1:6379", "abc")))
    assert (settings["ray_address"], settings["placement_group"]) == ("10.0.0.1:6379", "abc")
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment({"CUDA_VISIBLE_DEVICES": ""}, job)
