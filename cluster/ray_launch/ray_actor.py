"""The Ray actor of one worker: claims its room by being there, and passes lines between Ray and the keeper.

Relies on Ray: with `max_concurrency` above 1 every call of a class without coroutines has a thread of its own; a node's
actors find the driver's modules if these are installed there, or lie under the driver's `sys.path`; other drivers of
the cluster may use a placement group whose id they know, as long as its own driver lives.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import ray

import cluster
from cluster.ray_launch.messages import EndKept, Exited, Keep, KeeperSays, NotStarted, RayGroup, WorkerJob

KEEPER_LEAVES_S = 10.0
"""A keeper whose worker has ended needs this at most."""


class WorkerActor:
    """Started once. Every method blocks its thread; arguments and results are JSON."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._says = msgspec.json.Decoder[KeeperSays](KeeperSays)
        root = str(Path(cluster.__file__).parents[1])
        self._keeper = subprocess.Popen(
            (sys.executable, "-m", "cluster.ray_launch.keeper"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))},
            start_new_session=True,
        )
        self._worker_id = ""

    def start(self, job: bytes) -> bytes:
        """`Started` or `NotStarted`."""
        decoded = msgspec.json.decode(job, type=WorkerJob)
        self._worker_id = decoded.worker_id
        group = _group() if decoded.across_nodes else None
        self._tell(self._encoder.encode(Keep(decoded, ray.util.get_node_ip_address(), group)))
        return self._encoder.encode(self._next() or NotStarted(self._worker_id, "its keeper ended at once"))

    def until_exit(self) -> bytes:
        """`Exited`, when the worker's process has ended."""
        lost = Exited(self._worker_id, -9, [], f"the process that keeps worker {self._worker_id} on its node ended")
        return self._encoder.encode(self._next() or lost)

    def until_gone(self) -> None:
        """Returns when nothing is left of it."""
        self._keeper.wait()

    def end(self, grace_s: float) -> None:
        """Ends the worker: asks first, kills what is left after `grace_s`."""
        self._tell(self._encoder.encode(EndKept(grace_s)))

    def _tell(self, line: bytes) -> None:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(line + b"\n")
            self._keeper.stdin.flush()
        except BrokenPipeError:
            return  # it has ended, which `until_exit` tells

    def _next(self) -> KeeperSays | None:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        return self._says.decode(line) if line else None


def _group() -> RayGroup:
    """The placement group that this actor is in."""
    group = ray.util.get_current_placement_group()
    assert group is not None
    return RayGroup(ray.get_runtime_context().gcs_address, group.id.hex())
