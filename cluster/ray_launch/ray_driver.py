"""The process that is connected to Ray, on behalf of `twinpool serve`.

It is a process of its own because Ray ends the process of a driver that has lost it, takes over signals, and has
threads of its own; none of that belongs beside the API server. When `twinpool serve` is gone, the line ends, and this
process ends the workers and leaves. When this process is killed, Ray ends the actors, and each keeper its worker.

Relies on Ray: `await` of an object reference in asyncio; actors and placement groups that are not detached end with the
driver; `ray.exceptions.RayError`.

Run as `python -m cluster.ray_launch.ray_driver FD ADDRESS RUN_ID CLAIM_TIMEOUT_S`; FD is one end of a socket pair.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import sys
import threading
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.launch.watchdog import GRACE_S
from cluster.ray_launch.messages import (
    MAX_LINE_BYTES,
    Claim,
    Connected,
    End,
    EndAll,
    Exited,
    FromDriver,
    Gone,
    KeeperSays,
    NoRay,
    NotStarted,
    Release,
    Start,
    Started,
    ToDriver,
    Waiting,
    Wanted,
)
from cluster.ray_launch.ray_actor import KEEPER_LEAVES_S, WorkerActor
from cluster.ray_launch.ray_room import NoRoom, Room

log = logging.getLogger("twinpool.ray")

ACTOR_STARTS_S = 60.0
"""For Ray to start a process on a node, and for what an earlier one of the worker left there to go."""
THREADS = 8
"""Of an actor: its calls wait."""
MAX_REASON = 600
_KILLED = -9


class _Driver:
    """Every worker has one task from its start to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run_id: str, claim_timeout_s: float):
        self._reader = reader
        self._writer = writer
        self._run_id = run_id
        self._encoder = msgspec.json.Encoder()
        self._says = msgspec.json.Decoder[KeeperSays](KeeperSays)
        self._room = Room(claim_timeout_s, lambda text: self._tell(Waiting(text)))
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}

    async def run(self) -> None:
        """Obeys until the line ends or says so."""
        decoder = msgspec.json.Decoder[ToDriver](ToDriver)
        grace_s = GRACE_S
        with contextlib.suppress(ConnectionError):  # a launcher that was killed may leave lines unread
            while line := await self._reader.readline():
                told = decoder.decode(line)
                match told:
                    case Start(workers=workers):
                        self._start(workers)
                    case End(worker_id=worker_id, grace_s=seconds):
                        await self._end(worker_id, seconds)
                    case Release(worker_id=worker_id):
                        self._room.release(worker_id)
                    case EndAll(grace_s=seconds):
                        grace_s = seconds
                        break
        await self._end_all(grace_s)

    def _start(self, orders: list[Wanted]) -> None:
        self._room.claim([(order.job.worker_id, order.job.role, order.claim) for order in orders])
        for order in orders:
            life = asyncio.create_task(self._live(order), name=order.job.worker_id)
            self._lives[order.job.worker_id] = life
            life.add_done_callback(_log_failure)

    async def _live(self, order: Wanted) -> None:
        worker_id = order.job.worker_id
        try:
            started = await self._begin(order)
        except (RayError, NoRoom, TimeoutError, ValueError) as error:
            self._dismiss(worker_id)
            self._tell(NotStarted(worker_id, _sentence(error)))
            return
        self._tell(started)
        if isinstance(started, Started):
            self._tell(await self._until_exit(worker_id, started.node_ip))
            await self._until_gone(worker_id)
        self._dismiss(worker_id)
        self._tell(Gone(worker_id))

    async def _begin(self, order: Wanted) -> Started | NotStarted:
        job = order.job
        place = await self._room.seated(job.worker_id)
        self._actors[job.worker_id] = actor = _new_actor(order.claim, place)
        try:
            answer = await asyncio.wait_for(actor.start.remote(self._encoder.encode(job)), ACTOR_STARTS_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"Ray did not bring up its actor within {ACTOR_STARTS_S:g} s; the log of its node's raylet tells more"
            ) from error
        said = self._says.decode(answer)
        assert isinstance(said, Started | NotStarted)
        return said

    async def _until_exit(self, worker_id: str, node_ip: str) -> Exited:
        try:
            said = self._says.decode(await self._actors[worker_id].until_exit.remote())
        except RayError as error:
            cause = f"the Ray actor of worker {worker_id} on {node_ip} ended: {_sentence(error)}"
            return Exited(worker_id, _KILLED, [], cause)
        assert isinstance(said, Exited)
        return said

    async def _until_gone(self, worker_id: str) -> None:
        # An actor that died cannot tell. A watchdog ends its worker then, and the next keeper waits for that.
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actors[worker_id].until_gone.remote(), KEEPER_LEAVES_S)

    async def _end(self, worker_id: str, grace_s: float) -> None:
        actor = self._actors.get(worker_id)
        if actor is not None:
            with contextlib.suppress(RayError):
                actor.end.remote(grace_s)

    async def _end_all(self, grace_s: float) -> None:
        for worker_id in list(self._actors):
            await self._end(worker_id, grace_s)
        for worker_id, life in self._lives.items():
            if worker_id not in self._actors:
                life.cancel()  # it still waits for room
        lives = list(self._lives.values())
        if lives:
            await asyncio.wait(lives, timeout=grace_s + KEEPER_LEAVES_S)
        for worker_id in list(self._actors):
            self._dismiss(worker_id)
        self._room.release_all()

    def _dismiss(self, worker_id: str) -> None:
        actor = self._actors.pop(worker_id, None)
        if actor is not None:
            ray.kill(actor)

    def _tell(self, message: FromDriver) -> None:
        self._writer.write(self._encoder.encode(message) + b"\n")


def _new_actor(claim: Claim, place: PlacementGroupSchedulingStrategy) -> Any:
    mine = claim if claim.parts == 1 else Claim()
    actor_class = ray.remote(WorkerActor).options(
        num_cpus=mine.cpus,
        num_gpus=mine.gpus,
        resources=mine.others,
        scheduling_strategy=place,
        max_concurrency=THREADS,
        # Started again by the launcher, by the same rules as everywhere (`cluster/fleet/restarts.py`).
        max_restarts=0,
    )
    return actor_class.remote()


def _sentence(error: Exception) -> str:
    """What Ray says, without the ids that mean nothing to anybody and its list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    text, _, _ = " ".join(filter(None, lines)).partition(" Some common causes")
    return text[:MAX_REASON] or type(error).__name__


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("ray_driver_task_failed task=%s", task.get_name(), exc_info=error)
        os._exit(1)  # the launcher takes the workers for lost, and Ray ends them


def connect(address: str, run_id: str) -> Connected | NoRay:
    """Joins the Ray cluster."""
    try:
        ray.init(
            address=address,
            namespace=f"twinpool-{run_id}",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        return NoRay(_sentence(error))
    return Connected(ray.util.get_node_ip_address())


async def _main(line: socket.socket, run_id: str, claim_timeout_s: float, first: Connected) -> None:
    reader, writer = await asyncio.open_connection(sock=line, limit=MAX_LINE_BYTES)
    writer.write(msgspec.json.encode(first) + b"\n")
    await _Driver(reader, writer, run_id, claim_timeout_s).run()
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        writer.close()


def _leave_with_the_launcher(line: socket.socket, connected: threading.Event) -> None:
    """Ray's client may try to connect for minutes, and nobody reads the line meanwhile."""
    select.select((line,), (), ())
    if not connected.is_set():
        os._exit(1)  # the first thing to hear is said after that, so this is the end


if __name__ == "__main__":
    _fd, _address, _run_id, _claim_timeout_s = sys.argv[1:]
    _line = socket.socket(fileno=int(_fd))
    _connected = threading.Event()
    threading.Thread(target=_leave_with_the_launcher, args=(_line, _connected), daemon=True).start()
    _first = connect(_address, _run_id)
    _connected.set()
    if isinstance(_first, NoRay):
        _line.sendall(msgspec.json.encode(_first) + b"\n")
        sys.exit(1)
    asyncio.run(_main(_line, _run_id, float(_claim_timeout_s), _first))
    ray.shutdown()
