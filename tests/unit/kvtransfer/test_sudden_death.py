"""SIGKILL while blocks are being copied, on either side."""

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtransfer.copy_plan import CopyPlan
from kvtransfer.endpoint import copy_threads
from kvtransfer.links.host_memory import read_memory
from kvtransfer.links.zmq_frames import HostMemory
from tests.unit.kvtransfer.rank_pair import PROMPT_HASH, Cluster, eventually, is_known_whole, make_cache
from tests.unit.kvtransfer.rank_process import SEED

Spawn = Callable[..., tuple[subprocess.Popen[str], str, str]]
ONE_BLOCK = {"host": 200, "zmq": 800}
"""`chunk_bytes` with which every block is a piece of its own; a copy takes 4 chunks."""


class Killer:
    """Kills a process, for good, in the middle of the second piece that is moved."""

    def __init__(self) -> None:
        self.victim: subprocess.Popen[str] | None = None
        self.num_pieces = 0

    def piece_begins(self) -> None:
        self.num_pieces += 1
        if self.num_pieces == 2:
            assert self.victim
            self.victim.kill()
            self.victim.wait()


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    killer = Killer()
    scatter = HostMemory.scatter

    def killing_read(pid: int, plan: CopyPlan) -> None:
        killer.piece_begins()
        read_memory(pid, plan)

    def killing_scatter(memory: HostMemory, *arguments: Any) -> None:
        killer.piece_begins()
        scatter(memory, *arguments)

    monkeypatch.setattr(copy_threads, "NUM_THREADS", 1)  # so that the first piece has ended
    monkeypatch.setattr(copy_threads, "read_memory", killing_read)
    monkeypatch.setattr(HostMemory, "scatter", killing_scatter)
    return killer


def test_an_exporter_killed_in_mid_copy_leaves_only_what_was_whole(
    cluster: Cluster, link: str, spawn: Spawn, killer: Killer
) -> None:
    killer.victim, address, epoch = spawn(link, "finished")
    importer = cluster.rank(links=(link,), chunk_bytes=ONE_BLOCK[link], fetch_window=1, stalled_after_s=20)
    importer.endpoint.open_import("t", address, epoch, PROMPT_HASH, 12, wants_first_token=True)
    eventually(lambda: is_known_whole(importer, "t"))
    importer.endpoint.place_import("t", 0, [7, 8, 9])
    closed = importer.closed_import(timeout_s=3)
    assert (closed.outcome, closed.failure_kind, closed.first_token) == ("recompute", "peer_lost", 7)
    num_whole = 1 if link == "host" else 2  # on zmq the second piece had arrived
    assert closed.bad_block_ids == [7, 8, 9][num_whole:]
    theirs = make_cache(SEED)
    for layer, array in importer.cache.items():
        assert np.array_equal(array[[7, 8, 9][:num_whole]], theirs[layer][[1, 2, 3][:num_whole]])
    eventually(lambda: importer.endpoint.stats().failures == {"peer_lost": 1})
    eventually(lambda: not importer.endpoint.stats().peers)


def test_the_blocks_of_a_killed_importer_are_back_as_soon_as_the_proxy_drops_them(
    cluster: Cluster, link: str, spawn: Spawn
) -> None:
    exporter = cluster.rank(links=(link,), lease_first_s=30, lease_renew_s=30)
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    process, _, _ = spawn(link, "importer", exporter.endpoint.address, exporter.endpoint.epoch)
    exporter.endpoint.finish_export("t", [1, 2, 3], 12, 7)
    eventually(lambda: exporter.endpoint.stats().leases["held"])
    process.kill()
    process.wait()
    exporter.endpoint._post(exporter.endpoint._loop.exporter.drop, ["t"])
    assert exporter.closed_export(timeout_s=3).outcome == "dropped"
    eventually(lambda: not any(exporter.endpoint.stats().leases.values()))
