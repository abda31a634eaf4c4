"""Processes that end and are started again, or are not."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, LivenessConfig, Role, SimulationConfig, TransferConfig
from cluster.fleet import restarts
from cluster.fleet.fleet import Fleet, WorkerDown
from cluster.fleet.recruiting import Recruiter
from cluster.fleet.restarts import Mode
from cluster.launch import local as launch_local
from cluster.launch.local import WorkerCommand, in_role
from cluster.launch.seats import NothingFree
from cluster.launch.worker_plan import WorkerPlan
from cluster.simulated.launch import simulated_commands
from cluster.worker_settings import WorkerSettings, read_worker_settings, write_worker_settings
from tests.unit.cluster.families import alive, dummy, family


class Run:
    """A fleet and what it told."""

    def __init__(self, mode: Mode) -> None:
        self.downs: asyncio.Queue[WorkerDown] = asyncio.Queue()
        self.fleet = Fleet(mode, self.downs.put_nowait)

    async def next_down(self) -> WorkerDown:
        return await asyncio.wait_for(self.downs.get(), 15)


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr(restarts, "BACKOFF_S", (0.01,))
    monkeypatch.setattr(launch_local, "_ORPHAN_GRACE_S", 0.1)
    made = Run("on_failure")
    yield made
    await made.fleet.stop(0)


async def next_life(directory: Path, old: int) -> int:
    """The pid of a dummy that was started again."""
    async with asyncio.timeout(15):
        while (await family(directory))[0] == old:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return (await family(directory))[0]


async def test_a_killed_worker_is_started_again_when_nothing_is_left_of_it(run: Run, tmp_path: Path) -> None:
    await run.fleet.start([dummy(tmp_path)])
    run.fleet.serve()
    old = await family(tmp_path)
    os.kill(old[0], signal.SIGKILL)
    down = await run.next_down()
    assert (down.worker_id, down.returns, down.drained) == ("decode-0", True, False)
    assert run.fleet.notes()["decode-0"].starting
    assert alive([await next_life(tmp_path, old[0])]) != []
    assert alive(old) == []
    run.fleet.joined("decode-0", "decode")
    note = run.fleet.notes()["decode-0"]
    assert (note.starting, note.text, note.starts) == (False, "", 1)


async def test_who_leaves_because_it_is_told_stays_away_until_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    await run.fleet.start([dummy(tmp_path, behaviour="leaves")])
    run.fleet.serve()
    down = await run.next_down()
    assert (down.returns, down.drained) == (False, True)
    assert down.cause == "worker decode-0 left, as it was told"
    assert not run.fleet.notes()["decode-0"].starting
    run.fleet.start_now("decode-0")  # also while the rest of the old one is still being cleared away
    assert run.fleet.notes()["decode-0"].starting
    assert (await run.next_down()).drained, "it was started, and left again"


async def test_a_worker_that_fails_again_and_again_is_given_up(run: Run, tmp_path: Path) -> None:
    await run.fleet.start([dummy(tmp_path, behaviour="crash")])
    run.fleet.serve()
    downs = [await run.next_down() for _ in range(2)]
    assert [down.returns for down in downs] == [True, False]
    assert "failed 2 times in a row" in run.fleet.notes()["decode-0"].text
    assert len({down.exit.pid for down in downs}) == 2
    assert all(down.exit.last_lines.count("the dummy is up") == 1 for down in downs), "each from its own log"


async def test_one_that_runs_is_ended_first_when_it_is_to_start_now(run: Run, tmp_path: Path) -> None:
    await run.fleet.start([dummy(tmp_path)])
    run.fleet.serve()
    old = await family(tmp_path)
    run.fleet.start_now("decode-0")
    assert (await run.next_down()).returns
    await next_life(tmp_path, old[0])
    assert alive(old) == []


async def test_nobody_is_started_again_before_the_cluster_serves_or_after_it_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", (30.0,))
    await run.fleet.start([dummy(tmp_path, behaviour="crash")])
    assert not (await run.next_down()).returns
    run.fleet.serve()
    run.fleet.start_now("decode-0")
    assert (await run.next_down()).returns
    await asyncio.wait_for(run.fleet.stop(1), 10)


# ------------------------------------------------------------------------------------------- more and fewer workers


class Machine:
    """A planner with room for so many workers."""

    def __init__(self, directory: Path, room: int) -> None:
        self.directory, self.room, self.number = directory, room, 1
        self.left_by: list[str] = []

    def next(self, role: Role) -> WorkerPlan:
        if not self.room:
            raise NothingFree("no cores are free")
        self.room, self.number = self.room - 1, self.number + 1
        return WorkerPlan(f"{role}-{self.number - 1}", role, {}, {}, ())

    def left(self, worker_id: str) -> None:
        self.room += 1
        self.left_by.append(worker_id)

    def command(self, plan: WorkerPlan) -> WorkerCommand:
        return dummy(self.directory, plan.worker_id)


async def test_a_hired_worker_is_started_and_a_removed_one_is_gone_for_good(run: Run, tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    run.fleet.recruit_with(Recruiter(machine, machine.command))
    run.fleet.serve()
    assert run.fleet.hire("decode", 1) == ["decode-1"]
    pids = await family(tmp_path, "decode-1")
    with pytest.raises(NothingFree):
        run.fleet.hire("decode", 1)
    run.fleet.joined("decode-1", "decode")
    run.fleet.remove("decode-1")
    run.fleet.keep_down("decode-1")  # what is said later does not bring it back
    os.kill(pids[0], signal.SIGKILL)
    down = await run.next_down()
    assert (down.returns, down.outlook.text) == (False, "it was removed")
    async with asyncio.timeout(15):
        while machine.left_by != ["decode-1"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert alive(pids) == [], "its place is free when nothing is left of it"
    assert not run.fleet.knows("decode-1")
    assert run.fleet.hire("decode", 1) == ["decode-2"]
    await family(tmp_path, "decode-2")


async def test_a_worker_that_is_removed_while_it_starts_is_ended(run: Run, tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    run.fleet.recruit_with(Recruiter(machine, machine.command))
    run.fleet.serve()
    run.fleet.hire("decode", 2)
    await asyncio.sleep(0)  # one is being made, as far as it gets
    for worker_id in ("decode-1", "decode-2"):
        run.fleet.remove(worker_id, at_once=True)
    async with asyncio.timeout(15):
        while len(machine.left_by) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not run.fleet.launcher.runs("decode-1")


class SlowLauncher:
    """Starts a process when it is let."""

    def __init__(self) -> None:
        self.let, self.asked, self.is_up = asyncio.Event(), 0, False
        self.ended: list[str] = []

    async def start(self, commands: Sequence[WorkerCommand]) -> None:
        self.asked += 1
        await self.let.wait()
        self.is_up = True

    def runs(self, worker_id: str) -> bool:
        return self.is_up

    async def until_gone(self, worker_id: str) -> None:
        return

    def release(self, worker_id: str) -> None:
        return

    async def end(self, worker_id: str, grace_s: float) -> None:
        self.ended.append(worker_id)

    async def stop(self, grace_s: float) -> None:
        return

    def stop_now(self, grace_s: float) -> None:
        return


async def test_who_is_to_start_now_while_he_is_being_started_is_started_once(tmp_path: Path) -> None:
    launcher = SlowLauncher()
    fleet = Fleet("on_failure", lambda _down: None, lambda _on_exit: launcher)
    fleet.serve()
    fleet.add(dummy(tmp_path))
    async with asyncio.timeout(15):
        while not launcher.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
    fleet.start_now("decode-0")
    for _ in range(20):
        await asyncio.sleep(0)
    launcher.let.set()
    async with asyncio.timeout(15):
        while not launcher.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (launcher.asked, launcher.ended) == (1, [])
    fleet.remove("decode-0")
    fleet.start_now("decode-0")
    assert not fleet.knows("decode-0")
    assert launcher.ended == [], "it finishes what it has"
    await fleet.stop(0)


def simulated_process(tmp_path: Path, *worker_ids: str) -> WorkerCommand:
    simulation = SimulationConfig(workers_per_process=4)
    config = ClusterConfig(engine={}, simulation=simulation.model_copy(update={"enabled": True}))
    plans = [WorkerPlan(worker_id, "decode", {}, {}, (), simulated=True) for worker_id in worker_ids]
    (command,) = simulated_commands(plans, config, "m", None, tmp_path, os.environ)
    return command


async def test_a_process_of_several_workers_is_started_again_without_those_that_were_removed(
    run: Run, tmp_path: Path
) -> None:
    await run.fleet.start([simulated_process(tmp_path, "decode-0", "decode-1", "decode-2")])
    run.fleet.serve()
    run.fleet.remove("decode-0")
    run.fleet.remove("decode-2")
    os.kill(run.fleet.launcher.groups["decode-0"], signal.SIGKILL)  # type: ignore[attr-defined]
    downs = {down.worker_id: down.returns for down in [await run.next_down() for _ in range(3)]}
    assert downs == {"decode-0": False, "decode-1": True, "decode-2": False}
    async with asyncio.timeout(15):
        while not run.fleet.launcher.runs("decode-1"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not run.fleet.launcher.runs("decode-0")
    assert run.fleet.knows("decode-1"), "it is the only one there now"
    run.fleet.remove("decode-1", at_once=True)
    assert not (await run.next_down()).returns


def test_a_worker_that_took_another_role_is_started_again_in_that_one(tmp_path: Path) -> None:
    settings = WorkerSettings(
        worker_id="prefill-1",
        role="prefill",
        proxy_address="ipc:///p",
        runtime_dir=tmp_path,
        model="m",
        engine={"max_num_seqs": 4},
        transfer=TransferConfig(),
        liveness=LivenessConfig(),
        start_timeout_s=1,
        stop_timeout_s=1,
    )
    argv = ("python", "-m", "prefill.worker", str(write_worker_settings(settings)))
    changed = in_role(WorkerCommand("prefill-1", "prefill", argv, {}, tmp_path / "log"), "decode")
    assert (changed.role, changed.argv[2]) == ("decode", "decode.worker")
    assert read_worker_settings(Path(changed.argv[3])) == settings.model_copy(update={"role": "decode"})
    assert json.loads((tmp_path / "prefill-1.json").read_text())["engine"] == {"max_num_seqs": 4}
