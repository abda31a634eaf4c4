"""The clusters of the models: one `twinpool serve` each, on a private unix socket.

A child is a process of the launcher that also starts workers, so it ends when this process does, however that ends;
and a child ends its own workers in the same way.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from cluster.launch import watchdog
from cluster.launch.local import LaunchError, LocalLauncher, WorkerCommand, WorkerExit
from cluster.models.models_file import ModelSpec
from cluster.preflight.security_checks import API_KEY_VARIABLE
from proxy.models.turning import NotTurned, put_to_sleep, wake

log = logging.getLogger("twinpool.models")

_POLL_S = 0.25
_WATCH_EVERY_S = 5.0
_HEALTH_TIMEOUT_S = 5.0
# What a cluster may need beyond the times of its own configuration.
_START_MARGIN_S = 60.0
_STOP_MARGIN_S = 10.0
# Our side closes an idle connection first, so that no request goes out on one that is just being closed there.
_IDLE_CONNECTION_S = 30.0
_THEIR_IDLE_CONNECTION_S = 120
# After a SIGKILL to a cluster, its watchdog ends what it had started.
_AFTER_A_KILL_S = watchdog.GRACE_S + watchdog.DEATH_S
_LINES_OF_A_CAUSE = 4


Turn = Callable[[aiohttp.ClientSession, ModelSpec], Awaitable[None]]


@dataclass(eq=False)
class Child:
    """One start of a model's cluster, until nothing is left of it."""

    spec: ModelSpec
    socket: Path
    log_path: Path
    session: aiohttp.ClientSession
    """Connections to its API server."""
    exited: "asyncio.Future[WorkerExit]"
    verdict: str = ""
    """Why this process ended it, if it did so without being told."""
    stopping: bool = False
    started_s: float = field(default_factory=time.monotonic)


class Children:
    """All of them.

    Args:
        runtime_dir: a private directory for sockets, configurations and logs.
        environ: what children inherit.
        on_up: a model serves.
        on_down: nothing is left of it; with the cause, if nobody had told it to stop.
        on_failure: a task of ours failed; nothing can be relied on then.
        silent_after_s: one that answers nothing for so long is killed.
        on_asleep, on_woken: it sleeps, or serves again; with the seconds that this took.
        on_stuck: it does not, for this cause.
    """

    def __init__(
        self,
        runtime_dir: Path,
        environ: Mapping[str, str],
        on_up: Callable[[str, float], None],
        on_down: Callable[[str, str], None],
        on_failure: Callable[[BaseException], None],
        silent_after_s: float,
        on_asleep: Callable[[str, float], None] = lambda _name, _took_s: None,
        on_woken: Callable[[str, float], None] = lambda _name, _took_s: None,
        on_stuck: Callable[[str, str], None] = lambda _name, _cause: None,
    ) -> None:
        self.launcher = LocalLauncher(self._on_exit)
        self._runtime_dir = runtime_dir
        self._environ = environ
        self._on_up = on_up
        self._on_down = on_down
        self._on_failure = on_failure
        self._silent_after_s = silent_after_s
        self._on_asleep = on_asleep
        self._on_woken = on_woken
        self._on_stuck = on_stuck
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._orders: set[asyncio.Task[None]] = set()
        self._number = 0

    def find(self, name: str) -> Child | None:
        """The child of a model, as long as anything is left of it."""
        return self._children.get(name)

    def start(self, spec: ModelSpec) -> None:
        """Starts a model's cluster; `on_up` or `on_down` follows."""
        self._number += 1
        socket = self._runtime_dir / f"model-{self._number}.sock"
        child = Child(
            spec,
            socket,
            self._runtime_dir / f"{spec.name.replace('/', '--')}.log",
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_HEALTH_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                max_line_size=64 << 10,
                max_field_size=64 << 10,
            ),
            asyncio.get_running_loop().create_future(),
        )
        self._children[spec.name] = child
        task = asyncio.create_task(self._live(child), name=f"model {spec.name}")
        task.add_done_callback(self._supervise)
        self._tasks[spec.name] = task

    def stop(self, name: str) -> None:
        """Ends a model's cluster; `on_down` follows."""
        child = self._children[name]
        child.stopping = True
        self._spawn(self._end(child), f"stop model {name}")

    def sleep(self, name: str) -> None:
        """Puts a model's workers to sleep; `on_asleep`, `on_stuck` or `on_down` follows."""
        self._turn(name, put_to_sleep, self._on_asleep)

    def wake(self, name: str) -> None:
        """Wakes them; `on_woken`, `on_stuck` or `on_down` follows."""
        self._turn(name, wake, self._on_woken)

    def _turn(self, name: str, turn: Turn, on_done: Callable[[str, float], None]) -> None:
        child = self._children[name]

        async def carry_out() -> None:
            began_s = time.monotonic()
            try:
                await turn(child.session, child.spec)
            except NotTurned as error:
                if self._is_there(child):
                    self._on_stuck(name, str(error))
                return
            if self._is_there(child):
                on_done(name, time.monotonic() - began_s)

        self._spawn(carry_out(), f"turn model {name}")

    def _is_there(self, child: Child) -> bool:
        return self._children.get(child.spec.name) is child and not child.stopping

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)
        task.add_done_callback(self._supervise)

    async def close(self, grace_s: float) -> None:
        """Ends all of them; raises `LaunchError` naming the processes that survived."""
        longest_s = max((_stop_grace_s(child) for child in self._children.values()), default=0.0)
        try:
            await self.launcher.stop(min(grace_s, longest_s))
        finally:
            tasks = [*self._tasks.values(), *self._orders]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, child: Child) -> None:
        """One child from its start until nothing is left of it."""
        name = child.spec.name
        cause = ""
        try:
            try:
                await self.launcher.start([self._command(child)])
            except (LaunchError, OSError, ValueError) as error:  # the last: what cannot stand in a process' arguments
                cause = str(error)
            else:
                if child.stopping:  # told before there was a process to end
                    self.stop(name)
                cause = await self._until_gone(child)
        finally:
            await child.session.close()
            child.socket.unlink(missing_ok=True)
            child.socket.with_suffix(".yaml").unlink(missing_ok=True)
            if self._children.get(name) is child:
                del self._children[name]
        log.info("model_gone model=%s cause=%s", name, cause)
        self._tasks.pop(name, None)
        self._on_down(name, cause)

    async def _until_gone(self, child: Child) -> str:
        """The cause of its end."""
        attending = asyncio.create_task(self._attend(child), name=f"attend model {child.spec.name}")
        attending.add_done_callback(self._supervise)
        try:
            end = await child.exited
        finally:
            attending.cancel()
        await self.launcher.until_gone(child.spec.name)
        if end.returncode < 0:
            await asyncio.sleep(_AFTER_A_KILL_S)
        return child.verdict or cause_of(end)

    async def _attend(self, child: Child) -> None:
        """Tells when it serves, and ends it when it does not get there, or is silent."""
        limit_s = child.spec.cluster.start_timeout_s + _START_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                while not await self._answers(child, only_ok=True):  # noqa: ASYNC110 - its server cannot tell us
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            child.verdict = f"it did not serve within {limit_s:g} s; its log is {child.log_path}"
            await self._end(child)
            return
        self._on_up(child.spec.name, time.monotonic() - child.started_s)
        heard_s = time.monotonic()
        while time.monotonic() - heard_s < self._silent_after_s:
            await asyncio.sleep(min(_WATCH_EVERY_S, self._silent_after_s / 4))
            if await self._answers(child, only_ok=False):
                heard_s = time.monotonic()
        child.verdict = f"its API server was silent for {self._silent_after_s:g} s and was killed"
        log.warning("model_silent model=%s", child.spec.name)
        await self.launcher.end(child.spec.name, 0.0)

    async def _answers(self, child: Child, only_ok: bool) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
            async with child.session.get("http://model/health", timeout=timeout) as response:
                return response.status == 200 or not only_ok
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _end(self, child: Child) -> None:
        await self.launcher.end(child.spec.name, _stop_grace_s(child))

    def _on_exit(self, end: WorkerExit) -> None:
        child = self._children.get(end.worker_id)
        if child is not None and not child.exited.done():
            child.exited.set_result(end)

    def _command(self, child: Child) -> WorkerCommand:
        """Writes its configuration, which only this user may read, and says how to start it."""
        server = dict(child.spec.tree.get("server") or {})
        tree = {**child.spec.tree, "server": {**server, "options": {**(server.get("options") or {})}}}
        tree["server"]["options"]["uds"] = str(child.socket)
        path = child.socket.with_suffix(".yaml")
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(tree))
        env = {name: value for name, value in self._environ.items() if name != API_KEY_VARIABLE}
        env |= child.spec.config.env
        env["XDG_RUNTIME_DIR"] = str(self._runtime_dir)
        env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(_THEIR_IDLE_CONNECTION_S)
        return WorkerCommand(
            worker_id=child.spec.name,
            role="model",
            argv=(sys.executable, "-m", "cluster.cli", "serve", str(path)),
            env=env,
            log_path=child.log_path,
            noun="model",
        )

    def _supervise(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("models_task_failed task=%s", task.get_name(), exc_info=error)
            self._on_failure(error)


def cause_of(end: WorkerExit) -> str:
    """What a cluster said about its end, or else how its process ended."""
    lines = list(end.last_lines)
    for number, line in enumerate(lines):
        if line.startswith("twinpool: ") and "the logs are in" not in line:
            further = []
            for after in lines[number + 1 : number + _LINES_OF_A_CAUSE]:
                if not after.startswith("  "):
                    break
                further.append(after.strip())
            return " ".join([line.removeprefix("twinpool: "), *further])
    return end.cause


def _stop_grace_s(child: Child) -> float:
    return child.spec.cluster.stop_timeout_s + _STOP_MARGIN_S
