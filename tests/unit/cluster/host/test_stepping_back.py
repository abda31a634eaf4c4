"""How workers on CPUs step back for the processes that pass their tokens on."""

import subprocess
import sys
from pathlib import Path

STEP_BACK = """
import os, subprocess, sys
from pathlib import Path
from cluster.host.stepping_back import step_back
step_back(int(sys.argv[1]), Path(sys.argv[2]))
print(os.nice(0), subprocess.check_output(["nice"], text=True).strip())
"""


def stepped_back(niceness: int, autogroup: Path) -> str:
    """Niceness of a new process that did it, and of its child."""
    command = [sys.executable, "-c", STEP_BACK, str(niceness), str(autogroup)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_a_worker_and_its_children_step_back_and_so_does_their_session(tmp_path: Path) -> None:
    assert stepped_back(19, tmp_path / "autogroup") == "19 19"
    assert (tmp_path / "autogroup").read_text() == "19"


def test_zero_changes_nothing(tmp_path: Path) -> None:
    before = subprocess.check_output(["nice"], text=True).strip()
    assert stepped_back(0, tmp_path / "autogroup") == f"{before} {before}"
    assert not (tmp_path / "autogroup").exists()


def test_a_kernel_without_autogroups_is_no_obstacle(tmp_path: Path) -> None:
    assert stepped_back(19, tmp_path / "missing" / "autogroup") == "19 19"
