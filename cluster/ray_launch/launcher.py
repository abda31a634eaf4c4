"""The launcher for `launch: ray`: workers run where Ray has room for them, everything else on this machine.

It speaks to a driver process (`ray_driver.py`), which is connected to Ray; Ray is not imported here.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cluster.config import ROLES, Role
from cluster.fleet.launcher import OnExit
from cluster.launch.local import LaunchError, LocalLauncher, WorkerCommand, WorkerExit, describe_exit, last_lines
from cluster.launch.logs import log_failure
from cluster.ray_launch.config import RayConfig
from cluster.ray_launch.messages import (
    MAX_LINE_BYTES,
    Claim,
    Connected,
    End,
    EndAll,
    Exited,
    FromDriver,
    Gone,
    NoRay,
    NotStarted,
    Release,
    Start,
    Started,
    ToDriver,
    Waiting,
    Wanted,
    WorkerJob,
)

log = logging.getLogger("twinpool.launcher")

LISTENS_S = 5.0
"""For the head of the Ray cluster to take a connection."""
CONNECT_S = 60.0
"""For Ray's client to be imported and to find the cluster."""
ACTOR_S = 90.0
"""For an actor and its keeper to come up once there is room, more than the driver waits for that."""
LEAVES_S = 20.0
"""What a driver that ends everything needs besides the workers' grace."""
LEAVES_RAY_S = 5.0
"""For a driver that has ended everything to take leave of Ray."""
_POLL_S = 0.05


class RayLauncher:
    """Owns the workers of one cluster run. `connect` comes first; `on_exit` is called as a launcher's is."""

    def __init__(self, on_exit: OnExit, config: RayConfig, uses_gpus: bool) -> None:
        self._on_exit = on_exit
        self._config = config
        self._uses_gpus = uses_gpus
        self._here = LocalLauncher(on_exit)
        self._run_id = uuid.uuid4().hex
        self._runtime_dir: Path | None = None
        self._say: Callable[[str], None] = lambda _text: None
        self._driver: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._node_ip = ""
        self._commands: dict[str, WorkerCommand] = {}
        """Of workers that were told to start, by the first worker of the process."""
        self._answers: dict[str, asyncio.Future[Started | NotStarted]] = {}
        self._running: dict[str, Started] = {}
        self._gone: dict[str, asyncio.Event] = {}
        self._stopping = False

    # ------------------------------------------------------------------------------------------- the driver

    async def connect(self, runtime_dir: Path, say: Callable[[str], None]) -> str:
        """Joins the Ray cluster; this machine's address, as its nodes reach it.

        Raises `LaunchError`. `say` is told what is being waited for.
        """
        self._runtime_dir, self._say = runtime_dir, say
        await self._ensure_driver()
        return self._node_ip

    async def _ensure_driver(self) -> None:
        async with self._connecting:
            if self._driver is None:
                await self._start_driver()

    async def _start_driver(self) -> None:
        if self._stopping:
            raise LaunchError("the launcher is stopping and starts no more workers")
        assert self._runtime_dir is not None
        await _see_whether_somebody_listens(self._config.address)
        ours, theirs = socket.socketpair()
        log_path = self._runtime_dir / "ray-driver.log"
        arguments = (str(theirs.fileno()), self._config.address, self._run_id, f"{self._config.claim_timeout_s:g}")
        try:
            with theirs, log_path.open("ab") as output:
                driver = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "cluster.ray_launch.ray_driver", *arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise LaunchError(f"cannot start the process that connects to Ray: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        self._driver, self._line, self._writer = driver, ours, writer
        try:
            first = await asyncio.wait_for(reader.readline(), CONNECT_S)
            self._node_ip = _node_ip(first, self._config.address, log_path)
        except TimeoutError as error:
            await self._drop_driver()
            raise LaunchError(_no_ray(self._config.address, f"no answer within {CONNECT_S:g} s")) from error
        except BaseException:  # also when nobody waits for it any more
            await self._drop_driver()
            raise
        log.info("ray_connected node_ip=%s pid=%d", self._node_ip, driver.pid)
        self._reading = asyncio.create_task(self._read(reader, driver), name="read the Ray driver")
        self._reading.add_done_callback(log_failure)

    async def _drop_driver(self) -> None:
        driver, self._driver = self._driver, None
        if self._writer is not None:
            self._writer.close()
        if driver is not None:
            with contextlib.suppress(ProcessLookupError):
                driver.kill()
            await driver.wait()

    async def _read(self, reader: asyncio.StreamReader, driver: asyncio.subprocess.Process) -> None:
        decoder = msgspec.json.Decoder[FromDriver](FromDriver)
        try:
            while line := await reader.readline():
                self._hear(decoder.decode(line))
        except ConnectionError:
            pass
        except (msgspec.MsgspecError, ValueError) as error:  # `ValueError`: a line without an end
            log.error("ray_driver_not_understood pid=%d error=%s", driver.pid, error)
            with contextlib.suppress(ProcessLookupError):
                driver.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(driver.wait(), LEAVES_RAY_S)
        await self._drop_driver()
        if not self._stopping:
            log.warning("ray_driver_lost returncode=%s", driver.returncode)
        self._lose_all()

    def _hear(self, message: FromDriver) -> None:
        match message:
            case Waiting(text=text):
                log.warning("ray_has_no_room %s", text)
                self._say(text)
            case Started(worker_id=worker_id):
                self._running[worker_id] = message
                self._answer(worker_id, message)
                log.info(
                    "worker_started worker=%s node=%s pid=%d log=%s",
                    *(worker_id, message.node_ip, message.pid, message.log),
                )
            case NotStarted(worker_id=worker_id):
                self._answer(worker_id, message)
                self._set_gone(worker_id)
            case Exited():
                self._report(message)
            case Gone(worker_id=worker_id):
                self._set_gone(worker_id)
                log.info("worker_gone worker=%s", worker_id)
            case Connected() | NoRay():
                pass

    def _answer(self, worker_id: str, answer: Started | NotStarted) -> None:
        waiting = self._answers.pop(worker_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _set_gone(self, worker_id: str) -> None:
        # Who was not started may have been released before the driver has cleared up after it.
        if (event := self._gone.get(worker_id)) is not None:
            event.set()

    def _report(self, message: Exited) -> None:
        started = self._running.pop(message.worker_id, None)
        if started is None or self._stopping:
            return
        for worker_id, role in self._commands[message.worker_id].workers:
            cause = describe_exit(worker_id, message.returncode, message.last_lines)
            self._on_exit(
                WorkerExit(
                    worker_id=worker_id,
                    role=role,
                    pid=started.pid,
                    returncode=message.returncode,
                    cause=message.cause or cause,
                    last_lines=tuple(message.last_lines),
                    log_path=Path(f"{started.node_ip}:{started.log}"),
                )
            )

    def _lose_all(self) -> None:
        """Ray ends the actors of a driver that is gone, and their keepers end the workers."""
        for worker_id in list(self._answers):
            self._answer(worker_id, NotStarted(worker_id, "the process that is connected to Ray ended"))
        for worker_id in list(self._running):
            cause = f"worker {worker_id} was lost with the process that is connected to Ray ({self._log_hint()})"
            self._report(Exited(worker_id, -signal.SIGKILL, [], cause))
        for event in self._gone.values():
            event.set()

    def _log_hint(self) -> str:
        path = self._runtime_dir / "ray-driver.log" if self._runtime_dir is not None else Path("ray-driver.log")
        said = next((line.strip() for line in reversed(last_lines(path)) if line.strip()), "")
        return f"its log is {path}: {said}" if said else f"its log {path} is empty"

    def _tell(self, message: ToDriver) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    # ------------------------------------------------------------------------------------ what a launcher does

    async def start(self, commands: Sequence[WorkerCommand]) -> None:
        """Starts every worker where Ray has room; raises `LaunchError` saying what was asked for and what there is."""
        far = [command for command in commands if command.role in ROLES]
        await self._here.start([command for command in commands if command.role not in ROLES])
        if not far:
            return
        await self._ensure_driver()
        try:
            wanted = [Wanted(self._job(command), self._claim(command)) for command in far]
        except (OSError, ValueError) as error:
            raise LaunchError(f"the settings of a worker cannot be read any more: {error}") from error
        answers = {command.worker_id: asyncio.get_running_loop().create_future() for command in far}
        for command in far:
            self._commands[command.worker_id] = command
            self._gone[command.worker_id] = asyncio.Event()
        self._answers.update(answers)
        self._tell(Start(wanted))
        await asyncio.wait(answers.values(), timeout=self._config.claim_timeout_s + ACTOR_S)
        for worker_id, answer in answers.items():
            if not answer.done():
                self._answers.pop(worker_id, None)
        self._check([answer.result() for answer in answers.values() if answer.done()], answers)

    def _check(
        self, results: "list[Started | NotStarted]", asked: "dict[str, asyncio.Future[Started | NotStarted]]"
    ) -> None:
        if reasons := [f"worker {said.worker_id}: {said.reason}" for said in results if isinstance(said, NotStarted)]:
            raise LaunchError("\n".join(dict.fromkeys(reasons)))
        if missing := sorted(set(asked) - {said.worker_id for said in results}):
            raise LaunchError(f"Ray did not start {', '.join(missing)} in time; {self._log_hint()}")

    def started_at(self, worker_id: str) -> Path:
        """Node and path of a worker's log."""
        started = self._running[worker_id]
        return Path(f"{started.node_ip}:{started.log}")

    def _job(self, command: WorkerCommand) -> WorkerJob:
        settings = Path(command.argv[-1]).read_text()
        return WorkerJob(
            worker_id=command.worker_id,
            role=command.role,
            workers=command.workers,
            module=command.argv[-2],
            settings=settings,
            env=dict(command.env),
            run_id=self._run_id,
            across_nodes=json.loads(settings).get("across_nodes", False),
        )

    def _claim(self, command: WorkerCommand) -> Claim:
        settings = json.loads(Path(command.argv[-1]).read_text())
        engine = settings.get("engine")
        ranks = engine.get("tensor_parallel_size", 1) if engine is not None else 1
        role: Role = "prefill" if command.role == "prefill" else "decode"
        parts = ranks if settings.get("across_nodes", False) else 1
        return Claim(
            gpus=float(ranks // parts) if self._uses_gpus and engine is not None else 0.0,
            cpus=self._config.cpus_per_rank * (ranks // parts),
            others=self._config.resources.get(role) or {},
            parts=parts,
        )

    def runs(self, worker_id: str) -> bool:
        """Its process has not ended, as far as this machine has heard."""
        return worker_id in self._running or self._here.runs(worker_id)

    async def until_gone(self, worker_id: str) -> None:
        """Returns when nothing is left of a worker's last process; a keeper on its node waits for more, if need be."""
        event = self._gone.get(worker_id)
        await (event.wait() if event is not None else self._here.until_gone(worker_id))

    async def end(self, worker_id: str, grace_s: float) -> None:
        """Ends one worker; `on_exit` hears of it."""
        event = self._gone.get(worker_id)
        if event is None:
            await self._here.end(worker_id, grace_s)
            return
        self._tell(End(worker_id, grace_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), grace_s + LEAVES_S)

    def release(self, worker_id: str) -> None:
        """Gives its claim back to Ray."""
        if self._commands.pop(worker_id, None) is not None:
            self._gone.pop(worker_id, None)
            self._tell(Release(worker_id))

    async def stop(self, grace_s: float) -> None:
        """Ends every process and leaves Ray; raises `LaunchError` naming what survives."""
        self._stopping = True
        await asyncio.gather(self._stop_far(grace_s), self._here.stop(grace_s))

    async def _stop_far(self, grace_s: float) -> None:
        driver = self._driver
        if driver is not None:
            self._tell(EndAll(grace_s))
            try:
                await asyncio.wait_for(driver.wait(), grace_s + LEAVES_S)
            except TimeoutError:
                # Ray ends the actors of a driver that is gone.
                log.warning("ray_driver_killed pid=%d it did not leave in time", driver.pid)
                await self._drop_driver()
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    def stop_now(self, grace_s: float) -> None:
        """The same without the event loop: the end of the line tells the driver to end everything."""
        self._stopping = True
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)
        self._here.stop_now(grace_s)
        deadline = time.monotonic() + grace_s + LEAVES_S
        while self._driver is not None and _lives(self._driver.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


async def _see_whether_somebody_listens(address: str) -> None:
    """Ray itself would try for minutes. Raises `LaunchError`."""
    if address == "auto":
        return  # Ray knows at once
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LISTENS_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else str(error) or f"no connection within {LISTENS_S:g} s"
        raise LaunchError(_no_ray(address, reason)) from error
    writer.close()


def _node_ip(line: bytes, address: str, log_path: Path) -> str:
    """Out of the driver's first line; raises `LaunchError`."""
    if not line:
        said = "; ".join(last_lines(log_path)[-3:])
        raise LaunchError(_no_ray(address, f"the process that connects ended at once: {said or 'it said nothing'}"))
    try:
        first: Connected | NoRay = msgspec.json.decode(line, type=Connected | NoRay)
    except msgspec.MsgspecError as error:
        raise LaunchError(_no_ray(address, f"the process that connects is not understood: {error}")) from error
    if isinstance(first, NoRay):
        raise LaunchError(_no_ray(address, first.reason))
    return first.node_ip


def _no_ray(address: str, reason: str) -> str:
    return (
        f"cannot use the Ray cluster at {address}: {reason}. Start one with `ray start --head` and on further nodes "
        "`ray start --address=HEAD:6379`; this machine must be one of its nodes"
    )


def _lives(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
