"""A process of simulated workers.

SIGTERM drains them all; SIGINT, and a second SIGTERM, end them at once.
Run by the launcher as `python -m cluster.simulated SETTINGS.json`. Imports neither torch nor vLLM.
"""

import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop
import zmq.asyncio

from cluster.launch.logs import start_log
from cluster.simulated.host import SimulatedWorker
from cluster.simulated.settings import SimulatedSettings, read_simulated_settings
from cluster.simulated.transfers.peer_exchange import PeerExchange
from cluster.worker_settings import WorkerSettingsError

log = logging.getLogger("twinpool.simulated")


async def run_workers(settings: SimulatedSettings) -> int:
    """Runs the workers until all have left; the highest exit code."""
    stop = asyncio.Event()
    context = zmq.asyncio.Context()
    peers = PeerExchange(context, settings.peer_bind, settings.key)
    delivering = asyncio.create_task(peers.run(), name="peers")
    hosts = [SimulatedWorker(name, settings, context, peers) for name in settings.workers]

    def on_sigterm() -> None:
        num_draining = sum(host.drain() for host in hosts)
        if not num_draining:
            stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    workers = [asyncio.create_task(host.run(stop)) for host in hosts]
    log.info("simulated_workers process=%s count=%d", settings.name, len(workers))
    try:
        ended = asyncio.gather(*workers)
        await asyncio.wait((ended, delivering), return_when=asyncio.FIRST_COMPLETED)
        if delivering.done():
            log.error("peers_failed process=%s", settings.name, exc_info=delivering.exception())
            stop.set()
            await ended
            return 1
        return max(ended.result())
    finally:
        delivering.cancel()
        peers.close()
        context.term()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cluster.simulated SETTINGS.json (written by `twinpool serve`)")
    try:
        settings = read_simulated_settings(Path(sys.argv[1]))
    except WorkerSettingsError as error:
        sys.exit(str(error))
    start_log()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_code = runner.run(run_workers(settings))
    sys.exit(exit_code)
