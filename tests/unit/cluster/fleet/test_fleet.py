"""Processes that end and are started again, or are not."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster import launch_local
from cluster.config import LivenessConfig, TransferConfig
from cluster.fleet import restarts
from cluster.fleet.fleet import Fleet, WorkerDown
from cluster.fleet.restarts import Mode
from cluster.launch_local import WorkerCommand, in_role
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
