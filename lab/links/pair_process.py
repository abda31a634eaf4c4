"""One of the two processes of a pair: `python -m lab.links.pair_process PARENT_PID`.

Takes orders as lines of JSON from stdin, answers on stdout, and ends when stdin does, or with its parent.
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from lab.links.arms.block_cache import BlockCache
from lab.links.arms.kinds import ARMS, ArmFailed, ArmUnusable, ExporterSide, ImporterSide, Site, load
from lab.links.messages import (
    Done,
    Failed,
    FromProcess,
    Move,
    Moved,
    Offer,
    Queue,
    Ready,
    Setup,
    ToProcess,
    Transfer,
    Withdraw,
)

_PR_SET_PDEATHSIG = 1


class PairProcess:
    """One cache at a time, and one side of each arm."""

    def __init__(self, setup: Setup) -> None:
        arrays = np if setup.device is None else importlib.import_module("cupy")
        if setup.device is not None:
            arrays.cuda.Device(setup.device).use()
        self._cache = BlockCache(setup.shape, setup.num_blocks, arrays)
        if setup.is_exporter:
            self._cache.fill()
        else:
            self._cache.wipe()
        self._exporters: dict[str, ExporterSide] = {}
        self._importers: dict[str, ImporterSide] = {}
        self.ready = Ready({}, {})
        site = Site(self._cache, Path(setup.directory), setup.device)
        for name in setup.arms:
            try:
                self._add(name, site, setup)
            except ArmUnusable as error:
                self.ready.unusable[name] = str(error)

    def carry_out(self, order: ToProcess) -> FromProcess:
        """Raises ArmFailed."""
        match order:
            case Offer(arm, transfers):
                self._exporters[arm].offer(transfers)
                return Done()
            case Withdraw(arm):
                self._exporters[arm].withdraw()
                return Done()
            case Move(arm, transfers, timeout_s):
                importer = self._importers[arm]
                self._cache.wipe()
                seconds = importer.move(transfers, timeout_s)
                self._check(importer.effective(transfers))
                return Moved(seconds)
            case Queue(arm, large, small, pause_s, timeout_s):
                self._cache.wipe()
                queued = self._importers[arm].queue(large, small, pause_s, timeout_s)
                self._check([*small[: len(queued.small_s)], *([large] if large else [])])
                return queued
            case Setup():
                raise ArmFailed("a setup makes another `PairProcess`")

    def close(self) -> None:
        for importer in self._importers.values():
            importer.close()
        for exporter in self._exporters.values():
            exporter.close()

    def _add(self, name: str, site: Site, setup: Setup) -> None:
        kind = ARMS[name]
        of_link = (name,) if kind.is_link else ()
        if setup.is_exporter:
            exporter = load(kind.exporter)(site, *of_link)
            assert isinstance(exporter, ExporterSide)
            self._exporters[name] = exporter
            self.ready.offers[name] = exporter.offers
        else:
            importer = load(kind.importer)(site, setup.offers[name], *of_link)
            assert isinstance(importer, ImporterSide)
            self._importers[name] = importer

    def _check(self, transfers: Sequence[Transfer]) -> None:
        once = [
            Transfer(transfer.name, list(pairs), list(pairs.values()))
            for transfer in transfers
            for pairs in [dict(zip(transfer.source_ids, transfer.target_ids, strict=True))]
        ]
        if difference := self._cache.first_difference(once):
            raise ArmFailed(f"wrong bytes arrived: {difference}")


def main(parent: int, orders: BinaryIO, answers: BinaryIO) -> None:
    """Until `orders` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    decoder = msgspec.json.Decoder[ToProcess](ToProcess)
    process: PairProcess | None = None
    for line in orders:
        order = decoder.decode(line)
        answer: FromProcess
        try:
            if isinstance(order, Setup):
                if process is not None:
                    process.close()
                process = None
                gc.collect()  # endpoints refer to each other's parts; the old cache must go before the next one comes
                process = PairProcess(order)
                answer = process.ready
            elif process is not None:
                answer = process.carry_out(order)
            else:
                answer = Failed("this process is not set up")
        except ArmFailed as error:
            answer = Failed(str(error))
        except Exception as error:  # noqa: BLE001 - the other arms can still be measured
            answer = Failed(f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
    if process is not None:
        process.close()


if __name__ == "__main__":
    # Libraries that print to stdout must not end up among the answers.
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers_fd, "wb") as answers_file:
        main(int(sys.argv[1]), sys.stdin.buffer, answers_file)
    sys.stderr.flush()
    os._exit(0)  # libraries measured here take seconds to end, or do not
