"""What a fleet asks of whatever starts its processes: this machine (`cluster/launch/local.py`) or Ray."""

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.launch.local import WorkerCommand, WorkerExit


class Launcher(Protocol):
    """Owns the processes of one cluster run."""

    async def start(self, commands: Sequence[WorkerCommand]) -> None:
        """Starts every process; raises `LaunchError` when one cannot even be started."""

    def runs(self, worker_id: str) -> bool:
        """Its process has not ended; when it does, `on_exit` hears of it."""

    async def until_gone(self, worker_id: str) -> None:
        """Returns when nothing is left of a worker's last process."""

    def release(self, worker_id: str) -> None:
        """It will not be started again: what was kept for that is free."""

    async def end(self, worker_id: str, grace_s: float) -> None:
        """Ends one worker, at the latest soon after `grace_s`; `on_exit` hears of it."""

    async def stop(self, grace_s: float) -> None:
        """Ends every process and waits until all are gone; raises `LaunchError` naming those that survive."""

    def stop_now(self, grace_s: float) -> None:
        """The same without the event loop, from any thread."""


OnExit = Callable[[WorkerExit], None]
"""Called in the event loop at once when a process ends without `stop` having been asked for."""
MakeLauncher = Callable[[OnExit], Launcher]
