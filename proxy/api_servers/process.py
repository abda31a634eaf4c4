"""A further API server process: vLLM's API server, whose engine is the dispatcher of another process.

Run by the launcher as `python -m proxy.api_servers SETTINGS.json`, with the listening socket inherited.
Ends when it is told to, when the dispatcher is lost, and when its server fails; `twinpool serve` starts it again.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop

from cluster.launch.logs import start_log
from proxy.api_servers import messages
from proxy.api_servers.accept_loads import open_loads
from proxy.api_servers.control import ControlForward
from proxy.api_servers.link import DispatcherLink, DispatcherLost
from proxy.api_servers.settings import (
    ApiServerSettings,
    ApiServerSettingsError,
    hub_address,
    loads_path,
    read_api_server_settings,
)
from proxy.supervision import ProxyStartError, unless_stopped

log = logging.getLogger("twinpool.api_server")

EXIT_FAILED = 1


class ApiServerProcess:
    """One life of one process. `run` returns the exit code."""

    def __init__(self, settings: ApiServerSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._exit_code = 0

    @classmethod
    async def start_and_run(cls, settings: ApiServerSettings) -> int:
        """Sockets belong to the running loop, so the process is made inside it."""
        return await cls(settings).run()

    async def run(self) -> int:
        """Serves until told to stop; returns the exit code."""
        # The launcher, and its watchdog, send SIGINT to who should end at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        liveness = self._settings.config.liveness
        link = DispatcherLink(
            hub_address(self._settings.runtime_dir),
            self._settings.name,
            liveness.heartbeat_s,
            liveness.proxy_lost_after_s,
            self._leave,
        )
        try:
            await self._serve(link)
        except (ProxyStartError, DispatcherLost, RuntimeError) as error:
            log.error("api_server_failed error=%s: %s", type(error).__name__, error)
            return EXIT_FAILED
        finally:
            link.close()
        return self._exit_code

    def _leave(self, leave: messages.Leave) -> None:
        if not leave.for_good:
            self._exit_code = EXIT_FAILED
        self._stop.set()

    async def _serve(self, link: DispatcherLink) -> None:
        server = await unless_stopped(asyncio.to_thread(self._prepare), self._stop)
        if server is None:
            return
        try:
            welcome = await unless_stopped(link.welcome(self._settings.config.start_timeout_s), self._stop, link.tasks)
            if welcome is not None:
                await self._serve_through(link, server, welcome)
        finally:
            server.close()

    def _prepare(self) -> Any:
        """Imports vLLM and reads the model's configuration: some seconds, while the workers load."""
        from proxy.frontend.vllm_server import ApiServerSeat, VllmServer

        settings = self._settings
        loads = open_loads(loads_path(settings.runtime_dir))
        seat = ApiServerSeat(settings.index, settings.config.server.api_servers, loads)
        return VllmServer(settings.config, settings.model, socket.socket(fileno=settings.listening_fd), seat)

    async def _serve_through(self, link: DispatcherLink, server: Any, welcome: messages.Welcome) -> None:
        from proxy.api_servers.vllm_remote_client import RemoteClient

        server.adopt(welcome.engine)
        client = RemoteClient(link, welcome, server.returns_routed_experts)

        async def start_up(_llm: Any) -> None:
            link.send(messages.Ready())
            log.info("api_server_ready url=%s", server.url)

        await server.run(client, lambda app: ControlForward(app, link.control), start_up, link.tasks, self._stop)


def main() -> None:
    """Runs one process to its end and leaves, whatever still runs in a thread."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m proxy.api_servers SETTINGS.json (written by `twinpool serve`)")
    try:
        settings = read_api_server_settings(Path(sys.argv[1]))
    except ApiServerSettingsError as error:
        sys.exit(str(error))
    start_log()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    code = runner.run(ApiServerProcess.start_and_run(settings))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
