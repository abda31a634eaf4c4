"""Real processes and real links, a few MiB each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from lab.links.arms.block_cache import BlockCache
from lab.links.arms.kinds import ARMS, ArmFailed, ArmKind, ArmUnusable, ImporterSide, Offers, Site, load
from lab.links.command import run_links
from lab.links.measure import Placement, Plan, measure
from lab.links.messages import Move, Setup, Transfer
from lab.links.pair import Pair, PairLost
from lab.links.pair_process import PairProcess
from lab.links.shapes import BlockShape
from lab.links.work import scattered

TINY = BlockShape("tiny", num_layers=4, num_kv_heads=2, head_size=64, block_size=16, order="LBNHC")


def plan(*placements: Placement) -> Plan:
    return Plan(
        shapes=(TINY,),
        placements=placements,
        cache_bytes=2 << 20,
        rounds=2,
        seconds=20.0,
        fairness_seconds=5.0,
        move_timeout_s=5.0,
        large_bytes=8 << 20,
        large_repeats=1,
        num_small=5,
        num_alone=4,
    )


def processes_of(process: psutil.Process) -> list[psutil.Process]:
    """The pairs' that it started."""
    return [child for child in process.children() if "lab.links.pair_process" in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that has ended, perhaps another test's."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def has_ended(process: psutil.Process) -> bool:
    """Whether or not anybody has asked for its exit status."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_links_and_limits_move_the_right_bytes_between_two_processes() -> None:
    links = Placement(("memcpy", "readv", "tcp", "host", "zmq"))
    results = measure(plan(links), lambda _: None)
    assert results.skipped == []
    measured = {(one.arm, one.concurrent): one for one in results.series}
    assert set(measured) == {("memcpy", 1), ("readv", 1), ("tcp", 1)} | {
        (link, concurrent) for link in ("host", "zmq") for concurrent in (1, 8)
    }
    for one in measured.values():
        assert len(one.seconds) == 2
        assert one.num_bytes == one.num_blocks * TINY.block_bytes == 2 << 20
        assert 0.01 < one.gb_per_s.median < 1000
    assert [fairness.link for fairness in results.fairness] == ["host", "zmq"]
    for fairness in results.fairness:
        assert fairness.large_bytes == 8 << 20
        assert len(fairness.alone_s) == 2
        assert 1 <= len(fairness.behind_s) <= 5
    assert processes_of(psutil.Process()) == []


def test_a_pair_that_rests_can_be_woken_and_ended() -> None:
    with Pair(("memcpy",)) as pair:
        pair.end_setup(pair.begin_setup(TINY, 8))
        pair.rest()
        until_s = time.monotonic() + 5
        while {process.status() for process in processes_of(psutil.Process())} != {psutil.STATUS_STOPPED}:
            assert time.monotonic() < until_s
            time.sleep(0.005)
        pair.wake()
        assert pair.move("memcpy", scattered(8, 1, "t"), 5.0) > 0
        pair.rest()
    assert processes_of(psutil.Process()) == []


def test_a_dead_process_fails_its_arms_with_its_last_words_and_leaves_nothing_behind() -> None:
    with Pair(("readv",)) as pair:
        pair.end_setup(pair.begin_setup(TINY, 8))
        importer = processes_of(psutil.Process())[1]
        importer.kill()
        with pytest.raises(PairLost, match="exit status -9"):
            pair.move("readv", scattered(8, 1, "t"), 5.0)
        assert pair.is_lost
    assert processes_of(psutil.Process()) == []


class Lazy(ImporterSide):
    """Copies nothing."""

    def __init__(self, site: Site, offers: Offers) -> None: ...

    def move(self, transfers: Sequence[Transfer], timeout_s: float) -> float:
        return 0.001


def test_an_arm_that_moves_wrong_bytes_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = ArmKind("lazy", "lazy", "", exporter="", importer="")
    monkeypatch.setitem(ARMS, "lazy", kind)
    monkeypatch.setattr("lab.links.pair_process.load", lambda _: Lazy)
    process = PairProcess(Setup(False, TINY, 8, ["lazy"], str(tmp_path), offers={"lazy": {}}))
    with pytest.raises(ArmFailed, match="wrong bytes arrived: layer 0 of block"):
        process.carry_out(Move("lazy", scattered(8, 1, "t"), 1.0))


@pytest.mark.parametrize(("arm", "module"), [("nixl", "nixl"), ("mooncake", "mooncake")])
def test_a_rival_that_is_not_installed_says_so(
    arm: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ArmUnusable, match=f"the package {module} cannot be imported: .*extra `peers`"):
        load(ARMS[arm].exporter)(Site(BlockCache(TINY, 8), tmp_path, None))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"plot_file": Path("links.txt")}, "should end in one of .png"),
        ({"json_file": Path("/no/such/directory/links.json")}, "the directory /no/such/directory does not exist"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    options: dict[str, Path], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, Path | None] = {"json_file": None, "plot_file": None, **options}
    assert run_links(quick=True, large_gib=0.5, **files) == 2
    assert complaint in capsys.readouterr().err


def test_ctrl_c_ends_every_process() -> None:
    command = [sys.executable, "-c", "from cluster.cli import main; main()", "lab", "links", "--quick"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert "setting up" in process.stderr.readline()
        started = processes_of(psutil.Process(process.pid))
        assert len(started) == 6
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130
    assert all(has_ended(one) for one in started)


RESTING = """
import sys
from lab.links.pair import Pair
from lab.links.shapes import BlockShape
with Pair(("memcpy",)) as pair:
    shape = BlockShape("tiny", num_layers=1, num_kv_heads=1, head_size=64, block_size=16, order="LBHNC")
    pair.end_setup(pair.begin_setup(shape, 8))
    pair.rest()
    print("resting", flush=True)
    sys.stdin.read()
"""


def test_processes_end_with_the_one_that_started_them_even_while_they_rest(tmp_path: Path) -> None:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # who is killed leaves his directory behind
    with subprocess.Popen([sys.executable, "-c", RESTING], text=True, env=env, **streams) as process:
        assert process.stdout
        assert process.stdout.readline() == "resting\n"
        started = processes_of(psutil.Process(process.pid))
        assert len(started) == 2
        process.kill()
    until_s = time.monotonic() + 5
    while not all(has_ended(one) for one in started):
        assert time.monotonic() < until_s
        time.sleep(0.005)
