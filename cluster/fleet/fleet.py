"""The workers of a cluster run: started together, and each one again when it ended and should not have.

Until `serve` is called nothing is started again: a worker that dies while the cluster starts fails the start.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import Role
from cluster.fleet.launcher import Launcher, MakeLauncher
from cluster.fleet.recruiting import Recruiter
from cluster.fleet.restarts import REMOVED, Mode, Outlook, Restarts, StartAgain, StayDown
from cluster.launch.local import LaunchError, LocalLauncher, WorkerCommand, WorkerExit, in_role
from cluster.launch.logs import log_failure
from cluster.launch.seats import NothingFree
from cluster.simulated.launch import is_simulated, simulated_in_role, simulated_without
from cluster.status import LaunchNote
from cluster.worker_settings import WorkerSettingsError

log = logging.getLogger("twinpool.launcher")

END_GRACE_S = 3.0
"""For a worker that is ended because it does not leave."""


@dataclass(frozen=True)
class WorkerDown:
    """A worker's process ended; the proxy gives it up."""

    exit: WorkerExit
    outlook: Outlook

    @property
    def worker_id(self) -> str:
        return self.exit.worker_id

    @property
    def cause(self) -> str:
        return self.exit.cause

    @property
    def drained(self) -> bool:
        """It left because it was told to."""
        return self.exit.returncode == 0

    @property
    def returns(self) -> bool:
        return isinstance(self.outlook, StartAgain)


class Fleet:
    """Owns the launcher. `on_down` is called in the event loop at once when a worker's process ends."""

    def __init__(
        self, mode: Mode, on_down: Callable[[WorkerDown], None], make_launcher: MakeLauncher = LocalLauncher
    ) -> None:
        self.launcher: Launcher = make_launcher(self._ended)
        self._restarts = Restarts(mode)
        self._on_down = on_down
        self._serving = False
        self._commands: dict[str, WorkerCommand] = {}
        """By the first worker of the process; mostly it is the only one."""
        self._first_of: dict[str, str] = {}
        """The first worker of the process that each worker lives in."""
        self._outlooks: dict[str, Outlook] = {}
        """How it goes on with each process that has ended, by its first worker."""
        self._starts: dict[str, asyncio.Task[None]] = {}
        """To come or on their way; the newest per worker."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._notes: dict[str, LaunchNote] = {}
        self._recruiter: Recruiter | None = None
        self._starting: set[str] = set()
        """Processes that are being made at this moment."""
        self._removed: set[str] = set()
        """Workers that never come back; their ids are not given out again."""

    def recruit_with(self, recruiter: Recruiter) -> None:
        """Names who makes further workers; before that there are none."""
        self._recruiter = recruiter

    async def start(self, commands: Sequence[WorkerCommand]) -> None:
        """Starts every worker; raises `LaunchError` when one cannot even be started."""
        for command in commands:
            self._enlist(command)
        await self.launcher.start(commands)

    def _enlist(self, command: WorkerCommand) -> None:
        self._commands[command.worker_id] = command
        self._first_of.update({worker_id: command.worker_id for worker_id, _ in command.workers})

    def serve(self) -> None:
        """The cluster is up: from now on workers are started again."""
        self._serving = True

    async def stop(self, grace_s: float) -> None:
        """Ends every worker; raises `LaunchError` naming processes that survive that."""
        self._serving = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.launcher.stop(grace_s)

    # ------------------------------------------------------------------------------------- what the proxy tells

    def joined(self, worker_id: str, role: str) -> None:
        """A worker is in the cluster, serving in this role; if it is started again, then in the same."""
        first = self._first_of.get(worker_id, worker_id)
        self._restarts.joined(first, time.monotonic())
        command = self._commands.get(first)
        if command is not None and (worker_id, role) not in command.workers:
            simulated = is_simulated(command)
            try:
                changed = simulated_in_role(command, worker_id, role) if simulated else in_role(command, role)
            except (OSError, WorkerSettingsError) as error:
                log.error("role_not_kept worker=%s role=%s error=%s", worker_id, role, error)
            else:
                self._commands[first] = changed
        if worker_id in self._notes:
            self._notes[worker_id] = LaunchNote(False, "", self._notes[worker_id].starts)

    def keep_down(self, worker_id: str) -> None:
        """It is told to leave, and is not started again when it has. Others in its process stay, and so does that."""
        if self.knows(worker_id):
            self._restarts.order(worker_id, "stay")

    def start_when_gone(self, worker_id: str) -> None:
        """It is told to leave, and is started again when it has."""
        self._restarts.order(worker_id, "start")

    def knows(self, worker_id: str) -> bool:
        """Whether it has a process of its own, which was started here: only such a one can be started again alone.

        Not of one that is being removed.
        """
        command = self._commands.get(worker_id)
        return command is not None and not command.others and worker_id not in self._removed

    def start_now(self, worker_id: str) -> None:
        """Starts a worker's process; one that runs is ended first, with everything that it has.

        One that is being made at this moment is the new one already, and a removed one does not come back.
        """
        if worker_id in self._removed:
            return
        self._restarts.forgive(worker_id)
        self._note(worker_id, True, "it is started again, as it was told")
        if worker_id in self._starting:
            return
        if (pending := self._starts.pop(worker_id, None)) is not None:
            pending.cancel()
        if self.launcher.runs(worker_id):
            self._restarts.order(worker_id, "start")
            self._spawn(self.launcher.end(worker_id, END_GRACE_S), f"end {worker_id}")
        else:
            self._start_in(worker_id, 0.0)

    @property
    def devices(self) -> int | None:
        """GPUs, or shares of the cores, for all workers together; None: nobody counts them here."""
        return self._recruiter.planner.devices if self._recruiter is not None else None

    def hire(self, role: Role, count: int) -> list[str]:
        """Starts so many more workers of a pool, or none; their ids. Raises `NothingFree`, with a sentence."""
        if self._recruiter is None:
            raise NothingFree("nobody here can start further workers of this cluster")
        try:
            commands = self._recruiter.hire(role, count)
        except OSError as error:
            raise NothingFree(f"the settings of another {role} worker cannot be written: {error}") from error
        for command in commands:
            self.add(command)
        return [command.worker_id for command in commands]

    def add(self, command: WorkerCommand) -> None:
        """Starts one more worker; if that fails it is tried again, as for any other."""
        self._enlist(command)
        self._start_in(command.worker_id, 0.0)

    def remove(self, worker_id: str, *, at_once: bool = False) -> None:
        """It has been told to leave, or is not up, and never comes back; `at_once`: its process is ended.

        Others in its process stay, and so does that.
        """
        self._removed.add(worker_id)
        first = self._first_of.get(worker_id, worker_id)
        command = self._commands.get(first)
        if command is None:
            return
        if command.others:
            rest = simulated_without(command, worker_id)
            assert rest is not None
            self._commands[first] = rest
            self._notes.pop(worker_id, None)
            return
        self._restarts.order(first, "gone")
        if first in self._starting:
            return  # who starts it looks again
        if not self.launcher.runs(first):
            if (pending := self._starts.pop(first, None)) is not None:
                pending.cancel()
            self._spawn(self._forget(first), f"forget {first}")
        elif at_once:
            self._spawn(self.launcher.end(first, END_GRACE_S), f"end {first}")

    async def _forget(self, first: str) -> None:
        """Nothing is started under this id any more; what it computed on is free when nothing is left of it."""
        await self.launcher.until_gone(first)
        self.launcher.release(first)
        self._starts.pop(first, None)
        command = self._commands.pop(first, None)
        for worker_id in [worker_id for worker_id, process in self._first_of.items() if process == first]:
            del self._first_of[worker_id]
            self._notes.pop(worker_id, None)
        self._outlooks.pop(first, None)
        self._restarts.forget(first)
        if self._recruiter is not None and command is not None:
            self._recruiter.left(command.worker_id)
        log.info("worker_removed worker=%s", first)

    def notes(self) -> Mapping[str, LaunchNote]:
        """What is to be said about workers whose process has ended in this run."""
        return self._notes

    # ---------------------------------------------------------------------------------------------- one worker

    def _ended(self, worker_exit: WorkerExit) -> None:
        worker_id = worker_exit.worker_id
        first = self._first_of.get(worker_id, worker_id)
        outlook: Outlook = StayDown("the cluster is not up yet")
        if self._serving and first == worker_id:
            outlook = self._outlooks[first] = self._restarts.ended(first, worker_exit.returncode, time.monotonic())
            self._follow(first, outlook)
        elif self._serving and worker_id not in self._removed:
            # The first was reported before it, and takes it along.
            outlook = self._outlooks[first]
            self._note(worker_id, isinstance(outlook, StartAgain), outlook.text)
        self._on_down(WorkerDown(worker_exit, REMOVED if worker_id in self._removed else outlook))

    def _follow(self, first: str, outlook: Outlook) -> None:
        """Does what follows the end of a process."""
        if self._is_over(first):
            self._spawn(self._forget(first), f"forget {first}")
            return
        starts_again = isinstance(outlook, StartAgain)
        log.log(logging.INFO if starts_again else logging.WARNING, "worker_down worker=%s %s", first, outlook.text)
        if first not in self._removed:
            self._note(first, starts_again, outlook.text)
        if isinstance(outlook, StartAgain):
            self._start_in(first, outlook.after_s)

    def _is_over(self, first: str) -> bool:
        """Nobody is left who could be started in this process."""
        command = self._commands.get(first)
        return command is None or all(worker_id in self._removed for worker_id, _ in command.workers)

    def _note(self, worker_id: str, starting: bool, text: str, starts: int = 0) -> None:
        known = self._notes.get(worker_id)
        self._notes[worker_id] = LaunchNote(starting, text, (known.starts if known else 0) + starts)

    def _start_in(self, worker_id: str, after_s: float) -> None:
        pending = self._starts.get(worker_id)
        if pending is not None and pending is not asyncio.current_task():
            pending.cancel()  # two would start two processes of one worker
        self._starts[worker_id] = self._spawn(self._start_again(worker_id, after_s), f"start {worker_id}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)
        return task

    async def _start_again(self, first: str, after_s: float) -> None:
        await self.launcher.until_gone(first)
        await asyncio.sleep(after_s)
        command = self._commands[first]
        self._starting.add(first)
        try:
            await self.launcher.start([command])
        except LaunchError as error:
            log.error("worker_not_started worker=%s error=%s", first, error)
            self._follow(first, self._restarts.ended(first, 1, time.monotonic()))
            return
        finally:
            self._starting.discard(first)
        if self._is_over(first):  # it was removed meanwhile
            await self.launcher.end(first, END_GRACE_S)
        elif command.worker_id != first:
            self._name_after(command)
        elif first in self._notes:
            self._note(first, True, "it was started again", 1)

    def _name_after(self, command: WorkerCommand) -> None:
        """The first worker of a process was removed; the process goes by the name of the next one."""
        old = self._first_of[command.worker_id]
        self._commands.pop(old)
        self._outlooks.pop(old, None)
        self._restarts.forget(old)
        self._first_of = {worker_id: first for worker_id, first in self._first_of.items() if first != old}
        self._enlist(command)
