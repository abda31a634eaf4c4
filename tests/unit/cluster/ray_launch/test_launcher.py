import socket
from pathlib import Path

import pytest

from cluster.launch_local import LaunchError
from cluster.ray_launch.config import RayConfig
from cluster.ray_launch.launcher import RayLauncher


async def test_a_cluster_that_is_not_there_is_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        launcher = RayLauncher(lambda _exit: None, RayConfig(address=f"127.0.0.1:{port}"), uses_gpus=False)
        with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}: .*refused.*`ray start --head`"):
            await launcher.connect(tmp_path, lambda _text: None)
        await launcher.stop(0)
