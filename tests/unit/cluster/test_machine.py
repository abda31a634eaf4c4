import os
from pathlib import Path

import pytest

from cluster.preflight import machine
from cluster.preflight.machine import detect_machine


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four hardware threads on two cores, and no limits."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    for cpu in range(4):
        directory = tmp_path / f"cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    return tmp_path


def test_hardware_threads_are_told_from_cores(host: Path) -> None:
    found = detect_machine()
    assert (found.cores, found.siblings) == ((0, 1), (2, 3))


def test_a_cpu_quota_limits_the_cores(host: Path) -> None:
    (host / "cpu.max").write_text("150000 100000\n")
    assert (detect_machine().cores, detect_machine().siblings) == ((0, 1), ())
    (host / "cpu.max").write_text("50000 100000\n")
    assert detect_machine().cores == (0,)
    (host / "cpu.max").write_text("max 100000\n")
    assert detect_machine().cores == (0, 1)


def test_a_memory_limit_counts(host: Path) -> None:
    (host / "memory.max").write_text("1000000\n")
    (host / "memory.current").write_text("400000\n")
    assert detect_machine().memory_free_bytes == 600000


def test_visible_gpus_count_and_the_cpu_build_of_vllm_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    monkeypatch.setattr(machine, "_distribution_present", lambda _name: False)
    assert detect_machine().gpus == ("3", "5")
    monkeypatch.setattr(machine, "_distribution_present", lambda _name: True)
    assert detect_machine().gpus == ()
    assert detect_machine().on_cpu


def test_this_machine_has_a_core_and_memory() -> None:
    found = detect_machine()
    assert found.cores
    assert found.memory_free_bytes > 0
    assert found.environ == dict(os.environ)
