import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.launch.local import LaunchError, WorkerCommand, WorkerExit
from cluster.ray_launch.config import RayConfig
from cluster.ray_launch.launcher import RayLauncher
from cluster.ray_launch.messages import Claim


async def test_a_cluster_that_is_not_there_is_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        launcher = RayLauncher(lambda _exit: None, RayConfig(address=f"127.0.0.1:{port}"), uses_gpus=False)
        with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}: .*refused.*`ray start --head`"):
            await launcher.connect(tmp_path, lambda _text: None)
        await launcher.stop(0)


DRIVER = """
import socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
for text in LINES:
    line.sendall(text.encode() + b"\\n")
line.recv(1)
"""


def says(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What stands in for the driver says these lines, and then nothing."""
    start = asyncio.create_subprocess_exec
    source = DRIVER.replace("LINES", repr(lines))

    async def driver(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", source, *argv[3:], **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", driver)


async def test_a_driver_that_is_not_understood_is_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody would hear of any worker any more."""
    says(
        monkeypatch,
        '{"type":"Connected","node_ip":"127.0.0.1"}',
        '{"type":"Started","worker_id":"decode-0","pid":1,"node_ip":"127.0.0.1","log":"l"}',
        '{"type":"Gone","worker_id":"decode-7"}',  # of one that was released already
        '{"type":"Nonsense"}',
    )
    exits = asyncio.Queue[WorkerExit]()
    launcher = RayLauncher(exits.put_nowait, RayConfig(), uses_gpus=False)
    launcher._commands["decode-0"] = WorkerCommand("decode-0", "decode", (), {}, tmp_path / "log")
    assert await launcher.connect(tmp_path, lambda _text: None) == "127.0.0.1"
    lost = await asyncio.wait_for(exits.get(), 60)
    assert (lost.worker_id, "was lost" in lost.cause) == ("decode-0", True)
    await launcher.stop(0)


async def test_a_start_without_settings_fails_and_leaves_nothing_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, '{"type":"Connected","node_ip":"127.0.0.1"}')
    launcher = RayLauncher(lambda _exit: None, RayConfig(), uses_gpus=False)
    await launcher.connect(tmp_path, lambda _text: None)
    argv = ("python", "-m", "decode.worker", str(tmp_path / "removed.json"))
    with pytest.raises(LaunchError, match=r"removed\.json"):
        await launcher.start([WorkerCommand("decode-0", "decode", argv, {}, tmp_path / "log")])
    await asyncio.wait_for(launcher.until_gone("decode-0"), 60)
    await launcher.stop(0)


async def test_a_driver_that_begins_with_nonsense_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, "hello")
    launcher = RayLauncher(lambda _exit: None, RayConfig(), uses_gpus=False)
    with pytest.raises(LaunchError, match="not understood"):
        await launcher.connect(tmp_path, lambda _text: None)
    await launcher.stop(0)


@pytest.mark.parametrize(
    ("across_nodes", "claim"),
    [(False, Claim(gpus=4, cpus=8, others={"fast": 1})), (True, Claim(gpus=1, cpus=2, others={"fast": 1}, parts=4))],
)
def test_ranks_that_may_be_anywhere_are_claimed_one_by_one(tmp_path: Path, across_nodes: bool, claim: Claim) -> None:
    config = RayConfig(cpus_per_rank=2, resources={"decode": {"fast": 1}})
    settings = {"engine": {"tensor_parallel_size": 4}, "across_nodes": across_nodes}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    argv = ("python", "-m", "decode.worker", str(tmp_path / "settings.json"))
    command = WorkerCommand("decode-0", "decode", argv, {}, tmp_path / "log")
    launcher = RayLauncher(lambda _exit: None, config, uses_gpus=True)
    assert launcher._claim(command) == claim
    assert launcher._job(command).across_nodes == across_nodes
