import asyncio
import dataclasses
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.launch.held_start import start_held
from cluster.launch.local import (
    LaunchError,
    LocalLauncher,
    WorkerCommand,
    WorkerExit,
    describe_exit,
    keep_logs_only,
    make_runtime_dir,
    worker_command,
)
from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.worker_settings import read_worker_settings
from tests.unit.cluster.families import alive, dummy, family, gone_within


class Run:
    """A launcher and what it reported."""

    def __init__(self) -> None:
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self.launcher = LocalLauncher(self.exits.put_nowait)

    async def next_exit(self) -> WorkerExit:
        return await asyncio.wait_for(self.exits.get(), 15)


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    made = Run()
    yield made
    await made.launcher.stop(0)


async def test_stopping_leaves_no_process_of_any_worker(run: Run, tmp_path: Path) -> None:
    await run.launcher.start([dummy(tmp_path, "prefill-0"), dummy(tmp_path, "decode-0")])
    pids = [*await family(tmp_path, "prefill-0"), *await family(tmp_path, "decode-0")]
    assert alive(pids) == pids
    await run.launcher.stop(5)
    assert alive(pids) == []
    assert run.exits.empty(), "nobody is told of an end that was asked for"
    assert dict(run.launcher.groups) == {}


async def test_a_process_inherits_the_open_files_that_it_is_meant_to(run: Run, tmp_path: Path) -> None:
    theirs, mine = socket.socketpair()
    code = f"import os; os.write({theirs.fileno()}, b'here')"
    argv = (sys.executable, "-I", "-S", "-c", code)
    with theirs, mine:
        mine.settimeout(10)
        command = WorkerCommand("api-server-1", "api-server", argv, os.environ, tmp_path / "log", noun="process")
        await run.launcher.start([dataclasses.replace(command, pass_fds=(theirs.fileno(),))])
        assert (await run.next_exit()).cause == "process api-server-1 left, as it was told"
        assert mine.recv(4) == b"here"


async def test_workers_that_ignore_the_request_are_killed_after_the_grace_time(run: Run, tmp_path: Path) -> None:
    await run.launcher.start([dummy(tmp_path, behaviour="stubborn")])
    pids = await family(tmp_path)
    began_s = time.monotonic()
    await run.launcher.stop(0.3)
    assert alive(pids) == []
    assert 0.3 <= time.monotonic() - began_s < 5


async def test_a_crash_is_reported_with_its_cause_and_the_rest_of_the_worker_is_gone(run: Run, tmp_path: Path) -> None:
    await run.launcher.start([dummy(tmp_path, behaviour="crash")])
    pids = await family(tmp_path)
    told = await run.next_exit()
    assert (told.worker_id, told.role, told.pid) == ("decode-0", "decode", pids[0])
    assert told.cause == "worker decode-0 exited with code 3: ValueError: the dummy had enough"
    assert "the dummy is up" in told.last_lines
    assert told.log_path.read_text().count("the dummy is up") == 1
    assert await gone_within(pids, 5)


async def test_a_killed_worker_is_reported_with_the_signal(run: Run, tmp_path: Path) -> None:
    await run.launcher.start([dummy(tmp_path, "prefill-0"), dummy(tmp_path, "decode-0")])
    pids, others = await family(tmp_path, "prefill-0"), await family(tmp_path, "decode-0")
    os.kill(pids[0], signal.SIGKILL)
    told = await run.next_exit()
    assert told.worker_id == "prefill-0"
    assert "SIGKILL" in told.cause
    assert await gone_within(pids, 5)
    assert alive(others) == others, "the other worker is left alone"


async def test_the_shared_memory_of_a_killed_worker_is_removed(run: Run, tmp_path: Path) -> None:
    await run.launcher.start([dummy(tmp_path, behaviour="stubborn")])
    await family(tmp_path)
    segment = Path("/dev/shm") / (tmp_path / "decode-0.shm").read_text()
    assert segment.exists()
    await run.launcher.stop(0)
    assert not segment.exists()


async def test_a_worker_that_cannot_be_started_is_an_error_that_names_it(run: Run, tmp_path: Path) -> None:
    command = WorkerCommand("decode-0", "decode", ("/no/such/python",), {}, tmp_path / "log")
    with pytest.raises(LaunchError, match="cannot start worker decode-0"):
        await run.launcher.start([command])


async def test_after_stop_no_worker_is_started(run: Run, tmp_path: Path) -> None:
    await run.launcher.stop(0)
    with pytest.raises(LaunchError, match="stopping"):
        await run.launcher.start([dummy(tmp_path)])


async def test_stopping_works_without_the_event_loop(run: Run, tmp_path: Path) -> None:
    await run.launcher.start([dummy(tmp_path, behaviour="stubborn")])
    pids = await family(tmp_path)
    run.launcher.stop_now(0.1)
    assert await gone_within(pids, 2)


LAUNCHER_SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from cluster.launch import local as launch_local
from cluster.launch import watchdog
from cluster.launch.local import LocalLauncher
from tests.unit.cluster.families import dummy, family

# The same file, with less patience than three seconds.
impatient = "import runpy, sys; main = runpy.run_path(sys.argv[1])['main']; main.__globals__['GRACE_S'] = 0.2; main()"
watchdog.COMMAND = (sys.executable, "-I", "-S", "-c", impatient, watchdog.__file__)

directory, behaviour, moment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def die(process) -> None:
    pid = process if isinstance(process, int) else process.pid
    (directory / "held").write_text(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)

async def main() -> None:
    launcher = LocalLauncher(lambda told: None)
    launcher.guard.removes(directory)
    if moment == "covers":
        launcher.guard.covers = die
    if moment == "release":
        launch_local.release = die
    await launcher.start([dummy(directory, behaviour=behaviour)])
    if moment == "lose watchdog":
        await family(directory)
        lost = launcher.guard.pid
        os.kill(lost, signal.SIGKILL)
        while launcher.guard.pid in (None, lost):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_launcher_takes_all_processes_of_its_workers_along(tmp_path: Path) -> None:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER_SCRIPT, str(tmp_path), "stubborn", ""
    )
    try:
        pids = await family(tmp_path)
    finally:
        launcher.kill()
        await launcher.wait()
    assert await gone_within(pids, 20)


async def test_a_killed_launcher_takes_its_runtime_directory_along(tmp_path: Path) -> None:
    directory = tmp_path / "twinpool-1"
    directory.mkdir()
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER_SCRIPT, str(directory), "obedient", "removes"
    )
    pids = await family(directory)
    launcher.kill()
    await launcher.wait()
    assert await gone_within(pids, 20)
    deadline_s = time.monotonic() + 20
    while directory.exists():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("moment", ["covers", "release"])
async def test_a_launcher_that_is_killed_while_it_starts_a_worker_leaves_none(tmp_path: Path, moment: str) -> None:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER_SCRIPT, str(tmp_path), "stubborn", moment
    )
    assert await launcher.wait() == -signal.SIGKILL
    assert await gone_within([int((tmp_path / "held").read_text())], 20)
    assert not (tmp_path / "decode-0.pids").exists()


async def test_a_worker_that_is_never_released_never_starts(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as output:
        process = await start_held(("/bin/sh", "-c", "echo here"), {}, output)
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 15) == 1
    assert (tmp_path / "log").read_bytes() == b""


async def test_stopping_leaves_the_logs(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "twinpool-1"
    directory.mkdir()
    run.launcher.guard.removes(directory)
    await run.launcher.start([])
    await run.launcher.stop(0)
    assert directory.exists(), "whoever started it decides"


async def test_a_lost_watchdog_is_replaced_and_knows_what_the_lost_one_knew(tmp_path: Path) -> None:
    directory = tmp_path / "twinpool-1"
    directory.mkdir()
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER_SCRIPT, str(directory), "obedient", "lose watchdog"
    )
    pids = await family(directory)
    assert await launcher.wait() == -signal.SIGKILL
    assert await gone_within(pids, 20)
    deadline_s = time.monotonic() + 20
    while directory.exists():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


def test_the_runtime_directory_is_private_and_short_enough_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    path = make_runtime_dir()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(f"{path}/prefill-1023-kv-1023") < 108
    finally:
        path.rmdir()


def test_a_worker_is_told_its_part_of_the_configuration(tmp_path: Path) -> None:
    overrides = ["transfer.links=[zmq]", "engine.max_num_seqs=7", "pools.decode.env.X=1"]
    config = load_config(None, [*overrides, "scheduling.chunk_order=arrival", "slo.itl_s=0.3"])
    plan = WorkerPlanner(config, Machine(cores=(0, 1))).first()[1]
    command = worker_command(plan, config, "/models/m", tmp_path, {"PATH": "/bin", "X": "0"})
    assert command.argv[:3] == (sys.executable, "-m", "decode.worker")
    settings = read_worker_settings(Path(command.argv[3]))
    assert (settings.worker_id, settings.model) == ("decode-0", "/models/m")
    assert settings.transfer.links == ["zmq"]
    assert (settings.chunk_order, settings.itl_s) == ("arrival", 0.3)
    assert settings.engine["max_num_seqs"] == 7
    assert (command.env["PATH"], command.env["X"]) == ("/bin", "1")
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "1"


@pytest.mark.parametrize(
    ("returncode", "lines", "sentence"),
    [
        (1, [], "worker w exited with code 1"),
        (-15, [], "worker w was killed by SIGTERM"),
        (-40, [], "worker w was killed by signal 40"),
        (
            1,
            [
                "(EngineCore) ERROR ValueError: no room for KV",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "worker w exited with code 1: ValueError: no room for KV",
        ),
    ],
)
def test_the_end_of_a_worker_is_described_by_its_root_cause(returncode: int, lines: list[str], sentence: str) -> None:
    assert describe_exit("w", returncode, lines) == sentence


def test_of_a_run_that_failed_the_logs_stay_and_no_key_does(tmp_path: Path) -> None:
    nested, metrics = tmp_path / "twinpool-of-a-model", tmp_path / "metrics"
    nested.mkdir()
    metrics.mkdir()
    for name in ("cluster.key", "prefill-0.key", "api-server-1.json", "prefill-0.log", "metrics/counter.db"):
        (tmp_path / name).write_text(name)
    (nested / "decode-0.log").write_text("why")
    (nested / "decode-0.json").write_text("a key")
    keep_logs_only(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["prefill-0.log", "twinpool-of-a-model", "twinpool-of-a-model/decode-0.log"]
