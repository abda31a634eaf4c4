"""Starts the workers of a plan as processes of this machine, notices their end, and leaves none behind.

Each worker host is the leader of its own session, so a Ctrl-C in the terminal reaches the launcher alone, and a
worker can be ended with everything that its engine started. See `watchdog.py` for what happens when the launcher
itself is killed.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from cluster.config import ClusterConfig
from cluster.launch import watchdog
from cluster.launch.guard import Guard
from cluster.launch.held_start import release, start_held
from cluster.launch.logs import log_failure
from cluster.launch.worker_plan import WorkerPlan
from cluster.trust import cluster_key, proxy_address
from cluster.worker_settings import WorkerSettings, read_worker_settings, write_worker_settings

log = logging.getLogger("twinpool.launcher")

_LAST_LINES = 15
_TAIL_BYTES = 64 << 10
# How long the rest of a group may outlive its dead leader before it is killed.
_ORPHAN_GRACE_S = 2.0
_POLL_S = 0.05
_HOSTS_SHARE = 0.8
# Linux keeps socket paths in 108 bytes; `/prefill-1023-kv-1023` and a little more must fit behind the directory.
_MAX_RUNTIME_PATH = 70
_EXCEPTION_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Stopped|Lost): \S.*")
# vLLM says this above every engine that did not start; the line before it has the cause.
_SECOND_HAND = "Engine core initialization failed"


class LaunchError(Exception):
    """The workers could not be started; the text says why."""


@dataclass(frozen=True)
class WorkerExit:
    """A worker host ended although nobody asked it to."""

    worker_id: str
    role: str
    pid: int
    returncode: int
    """Negative: the signal that ended it."""
    cause: str
    """A sentence for the operator and, in short, for the client."""
    last_lines: tuple[str, ...]
    """The end of its log."""
    log_path: Path


@dataclass(frozen=True)
class WorkerCommand:
    """A process to start: what to run, on top of which environment, and where its output goes."""

    worker_id: str
    role: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    others: Sequence[tuple[str, str]] = ()
    """Further workers, id and role, that live in the same process and end with it."""
    noun: str = "worker"
    """What it is, in messages to the operator."""
    pass_fds: Sequence[int] = ()
    """Open files that it inherits under the same numbers."""

    @property
    def workers(self) -> list[tuple[str, str]]:
        """Id and role of every worker in the process."""
        return [(self.worker_id, self.role), *self.others]


def make_runtime_dir() -> Path:
    """A new directory that only this user can enter, with a path short enough for sockets."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and os.access(base, os.W_OK | os.X_OK) and len(base) + len("/twinpool-12345678") <= _MAX_RUNTIME_PATH:
            return Path(tempfile.mkdtemp(prefix=watchdog.DIRECTORY_PREFIX, dir=base))
    raise LaunchError(
        "no directory for sockets: neither XDG_RUNTIME_DIR nor TMPDIR nor /tmp is writable with a path of at most "
        f"{_MAX_RUNTIME_PATH} characters; set TMPDIR to one that is"
    )


def worker_command(
    plan: WorkerPlan, config: ClusterConfig, model: str, runtime_dir: Path, base_env: Mapping[str, str]
) -> WorkerCommand:
    """Writes a worker's settings into the runtime directory and says how to start it."""
    settings = WorkerSettings(
        worker_id=plan.worker_id,
        role=plan.role,
        proxy_address=proxy_address(runtime_dir, config.security),
        key=cluster_key(config),
        runtime_dir=runtime_dir,
        model=model,
        engine=dict(plan.engine),
        transfer=config.transfer,
        chunk_order=config.scheduling.chunk_order,
        itl_s=config.slo.itl_s,
        liveness=config.liveness,
        prefix_events=config.scheduling.prefix_events,
        niceness=plan.niceness,
        across_nodes=plan.across_nodes,
        start_timeout_s=config.start_timeout_s,
        # The host ends its engine within this, and is itself gone before the launcher loses patience.
        stop_timeout_s=config.stop_timeout_s * _HOSTS_SHARE,
        drain_timeout_s=config.drain_timeout_s,
    )
    return WorkerCommand(
        worker_id=plan.worker_id,
        role=plan.role,
        argv=(sys.executable, "-m", f"{plan.role}.worker", str(write_worker_settings(settings))),
        env=MappingProxyType({**base_env, **plan.env}),
        log_path=runtime_dir / f"{plan.worker_id}.log",
    )


def in_role(command: WorkerCommand, role: str) -> WorkerCommand:
    """The same worker, but serving in another role when it is started again; its settings are rewritten.

    Cores, devices and engine options stay those of the pool that it belongs to.
    """
    settings = read_worker_settings(Path(command.argv[-1])).model_copy(update={"role": role})
    argv = (*command.argv[:-2], f"{role}.worker", str(write_worker_settings(settings)))
    return replace(command, role=role, argv=argv)


class LocalLauncher:
    """Owns the worker processes of one cluster run.

    `on_exit` is called in the event loop at once when a worker ends without having been asked to; what its engine
    left behind is ended right after.
    """

    def __init__(self, on_exit: Callable[[WorkerExit], None], guard: Guard | None = None) -> None:
        self._on_exit = on_exit
        self.guard = guard or Guard()
        self._groups: dict[str, int] = {}
        self._running: set[str] = set()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def groups(self) -> Mapping[str, int]:
        """Process group of every worker that is not known to be gone, by worker id."""
        return MappingProxyType(self._groups)

    async def start(self, commands: Sequence[WorkerCommand]) -> None:
        """Starts every worker; raises `LaunchError` when one cannot even be started."""
        try:
            await self.guard.start()
        except OSError as error:
            raise LaunchError(f"cannot start the watchdog, which ends workers with this process: {error}") from error
        for command in commands:
            await self._spawn(command)

    async def _spawn(self, command: WorkerCommand) -> None:
        if self._stopping:
            raise LaunchError("the launcher is stopping and starts no more workers")
        try:
            with command.log_path.open("ab") as output:
                log_start = output.tell()
                process = await start_held(command.argv, command.env, output, command.pass_fds)
        except OSError as error:
            raise LaunchError(f"cannot start {command.noun} {command.worker_id}: {error}") from error
        self._groups.update({worker_id: process.pid for worker_id, _ in command.workers})
        self._running.update(worker_id for worker_id, _ in command.workers)
        self.guard.covers(process.pid)
        release(process)
        log.info("worker_started worker=%s pid=%d log=%s", command.worker_id, process.pid, command.log_path)
        watcher = asyncio.create_task(self._watch(command, process, log_start), name=f"watch {command.worker_id}")
        watcher.add_done_callback(log_failure)
        self._watchers[command.worker_id] = watcher

    async def _watch(self, command: WorkerCommand, process: asyncio.subprocess.Process, log_start: int) -> None:
        returncode = await process.wait()
        self._running.difference_update(worker_id for worker_id, _ in command.workers)
        group = process.pid
        if not self._stopping:
            lines = last_lines(command.log_path, log_start)
            for worker_id, role in command.workers:
                self._on_exit(
                    WorkerExit(
                        worker_id=worker_id,
                        role=role,
                        pid=group,
                        returncode=returncode,
                        cause=describe_exit(worker_id, returncode, lines, command.noun),
                        last_lines=tuple(lines[-_LAST_LINES:]),
                        log_path=command.log_path,
                    )
                )
        # vLLM's children notice that their host is gone, but not at any moment of their start.
        watchdog.signal_members(group, signal.SIGTERM)
        await _until_gone([group], _ORPHAN_GRACE_S)
        await _kill([group])
        for worker_id, _ in command.workers:
            self._groups.pop(worker_id, None)
        self.guard.spares(group)
        log.info("worker_gone worker=%s pid=%d returncode=%d", command.worker_id, group, returncode)

    def runs(self, worker_id: str) -> bool:
        """Its process has not ended; when it does, `on_exit` hears of it."""
        return worker_id in self._running

    async def until_gone(self, worker_id: str) -> None:
        """Returns when nothing is left of a worker's last process."""
        watcher = self._watchers.get(worker_id)
        if watcher is not None:
            await asyncio.wait((watcher,))

    def release(self, worker_id: str) -> None:
        """Nothing is kept for a worker of this machine once its process is gone."""
        self._watchers.pop(worker_id, None)

    async def end(self, worker_id: str, grace_s: float) -> None:
        """Ends one worker as `stop` ends all of them; `on_exit` hears of it."""
        group = self._groups.get(worker_id)
        if group is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGINT)
        await _until_gone([group], grace_s)
        await _kill([group])

    async def stop(self, grace_s: float) -> None:
        """Asks every worker to leave, kills what is left after `grace_s`; returns when all are gone.

        The hosts stop their own engines. After `grace_s` whole groups are killed. Raises `LaunchError` naming the
        processes that survived even that.
        """
        self._stopping = True
        groups = sorted(set(self._groups.values()))
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.kill(group, signal.SIGINT)  # SIGTERM would let it finish its requests
        await _until_gone(groups, grace_s)
        await _kill(groups)
        if self._watchers:
            await asyncio.wait(self._watchers.values(), timeout=_ORPHAN_GRACE_S * 2)
        await self.guard.dismiss()
        survivors = [pid for group in groups for pid in watchdog.members(group)]
        if survivors:
            raise LaunchError(f"these worker processes could not be killed: {', '.join(map(str, survivors))}")

    def stop_now(self, grace_s: float) -> None:
        """The same without the event loop, for a signal that arrives while that is busy importing."""
        self._stopping = True
        watchdog.end_groups(set(self._groups.values()), grace_s)


async def _kill(groups: Sequence[int]) -> None:
    for group in groups:
        watchdog.kill_computing(group)
    await _until_gone(groups, watchdog.DEATH_S)
    for group in groups:
        watchdog.signal_members(group, signal.SIGKILL)
    await _until_gone(groups, watchdog.DEATH_S)


async def _until_gone(groups: Sequence[int], timeout_s: float) -> None:
    """Returns when the groups are empty, at the latest after `timeout_s`.

    Looked up again and again, because nobody is told when a process ends that is not his child.
    """
    deadline = time.monotonic() + timeout_s
    while any(watchdog.members(group) for group in groups) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def describe_exit(worker_id: str, returncode: int, lines: Sequence[str], noun: str = "worker") -> str:
    """One sentence on how a worker ended and, where its log tells, why."""
    if returncode < 0:
        name = _signal_name(-returncode)
        hint = " (perhaps the machine ran out of memory)" if -returncode == signal.SIGKILL else ""
        return f"{noun} {worker_id} was killed by {name}{hint}"
    if returncode == 0:
        return f"{noun} {worker_id} left, as it was told"
    reasons = [found[0] for line in lines if (found := _EXCEPTION_LINE.search(line)) and _SECOND_HAND not in line]
    return f"{noun} {worker_id} exited with code {returncode}" + (f": {reasons[-1]}" if reasons else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def last_lines(path: Path, start: int = 0) -> list[str]:
    """The end of a log, from the byte `start` on: what is before it was written by an earlier process."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def remove_runtime_dir(runtime_dir: Path) -> None:
    """Removes sockets, settings and logs of a run that ended well."""
    shutil.rmtree(runtime_dir, ignore_errors=True)


def keep_logs_only(runtime_dir: Path) -> None:
    """Leaves the logs of a run that failed; keys, and settings with keys in them, go."""
    for path in sorted(runtime_dir.rglob("*"), reverse=True):  # what is in a directory before the directory
        with contextlib.suppress(OSError):  # a directory that still holds a log
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path.suffix != ".log":
                path.unlink()
