"""The process beside a Ray actor that starts the worker on its node, keeps its log, and ends it with all its children.

It does on that node what `twinpool serve` does on its own, with the same launcher: when this process is killed, a
watchdog ends the worker; when the actor goes, its line ends, and this process ends the worker and leaves. It is not the
actor itself, because Ray kills the children of an actor that ends, a watchdog among them.

Run by the actor as `python -m cluster.ray_launch.keeper`, with lines of JSON on its standard input and output.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from cluster.launch import watchdog
from cluster.launch.local import (
    LaunchError,
    LocalLauncher,
    WorkerCommand,
    WorkerExit,
    keep_logs_only,
    make_runtime_dir,
    remove_runtime_dir,
)
from cluster.ray_launch.leftovers import MARK, end_leftovers
from cluster.ray_launch.messages import (
    MAX_LINE_BYTES,
    EndKept,
    Exited,
    Keep,
    KeeperSays,
    KeeperTold,
    NotStarted,
    RayGroup,
    Started,
    WorkerJob,
)
from cluster.settings_document import write_private

_RAYS_OWN = "RAY_"
# Ray sets it to the CPUs of the claim; workers on CPUs are told theirs, and those on GPUs shall not be held to it.
_RAYS_TOO = ("OMP_NUM_THREADS",)
# An actor that claims no GPU sees none. If the ranks are actors of their own, its engine still must see what kind there
# is; none of it is used.
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def settings_on_node(document: str, directory: Path, node_ip: str, group: RayGroup | None = None) -> str:
    """The settings document with what belongs to this node: its private directory, and where its ranks listen."""
    settings: dict[str, Any] = json.loads(document)
    settings["runtime_dir"] = str(directory)
    settings["transfer"]["bind_host"] = node_ip
    if group is not None:
        settings["ray_address"], settings["placement_group"] = group.address, group.group_id
    return json.dumps(settings)


def worker_environment(here: Mapping[str, str], job: WorkerJob) -> dict[str, str]:
    """The node's environment without what Ray put there for the actor, except its GPUs, and with what the job wants."""
    without = (*_RAYS_TOO, *_HIDING) if job.across_nodes else _RAYS_TOO
    own = {name: value for name, value in here.items() if not name.startswith(_RAYS_OWN) and name not in without}
    return {**own, **job.env, MARK: mark_of(job)}


def mark_of(job: WorkerJob) -> str:
    """By which the processes of this worker are known on a node, whoever started them."""
    return f"{job.run_id}/{job.worker_id}"


class _Keeper:
    """One worker, from the first line to the last process gone."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._told = msgspec.json.Decoder[KeeperTold](KeeperTold)
        self._encoder = msgspec.json.Encoder()
        self._exit: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        self._launcher = LocalLauncher(self._on_exit)
        self._asked_to_end = False

    def _on_exit(self, worker_exit: WorkerExit) -> None:
        if not self._exit.done():  # further workers of the same process
            self._exit.set_result(worker_exit)

    async def run(self) -> None:
        line = await self._reader.readline()
        if not line:
            return
        keep = self._told.decode(line)
        assert isinstance(keep, Keep)
        job = keep.job
        directory = make_runtime_dir()
        self._launcher.guard.removes(directory)
        try:
            await end_leftovers(mark_of(job))
            await self._launcher.start([_command(keep, directory)])
        except (LaunchError, OSError) as error:
            remove_runtime_dir(directory)
            self._say(NotStarted(job.worker_id, str(error)))
            await self._launcher.stop(0)
            return
        log_path = directory / f"{job.worker_id}.log"
        pid = self._launcher.groups[job.worker_id]
        self._say(Started(job.worker_id, pid, keep.node_ip, str(log_path)))
        orders = asyncio.create_task(self._obey(job.worker_id), name="orders")
        await asyncio.wait((orders, self._exit), return_when=asyncio.FIRST_COMPLETED)
        ended = await self._exit
        self._say(Exited(job.worker_id, ended.returncode, list(ended.last_lines)))
        await self._launcher.until_gone(job.worker_id)
        orders.cancel()
        await self._launcher.stop(0)
        if self._asked_to_end or ended.returncode == 0:
            remove_runtime_dir(directory)
        else:
            keep_logs_only(directory)

    async def _obey(self, worker_id: str) -> None:
        """Until the line ends; then the worker is ended as well."""
        grace_s = watchdog.GRACE_S
        # What cannot be read is the end of the line, too: nobody else would end the worker.
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            while line := await self._reader.readline():
                told = self._told.decode(line)
                if isinstance(told, EndKept):
                    grace_s = told.grace_s
                    break
        self._asked_to_end = True
        await self._launcher.end(worker_id, grace_s)

    def _say(self, message: KeeperSays) -> None:
        try:
            sys.stdout.buffer.write(self._encoder.encode(message) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # The actor is gone. What is kept is ended all the same, by the end of the line.
            return


def _command(keep: Keep, directory: Path) -> WorkerCommand:
    job = keep.job
    path = directory / f"{job.worker_id}.json"
    write_private(path, settings_on_node(job.settings, directory, keep.node_ip, keep.group))
    first, *others = job.workers
    return WorkerCommand(
        worker_id=first[0],
        role=first[1],
        argv=(sys.executable, "-m", job.module, str(path)),
        env=MappingProxyType(worker_environment(os.environ, job)),
        log_path=directory / f"{job.worker_id}.log",
        others=tuple(others),
    )


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await _Keeper(reader).run()


if __name__ == "__main__":
    # Ctrl-C in the terminal of a raylet. A function, because what is ignored is ignored by the worker as well.
    signal.signal(signal.SIGINT, lambda *_: None)
    # Ray starts its processes with SIGINT blocked, which is inherited, and workers are told to end by it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    asyncio.run(_main())
