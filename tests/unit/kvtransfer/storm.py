"""Many transfers at once between two ranks, some aborted, some failing, while the ranks are restarted under them.

Engines are played as harshly as the rules allow: an exporter's blocks are overwritten the moment its export closes, an
importer's are marked when they are given back and must bear the mark when they are taken again, and every life of a
rank writes other data than the one before.
"""

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kvtransfer.endpoint.copy_threads import CopyJob, CopyResult, CopyThreads
from kvtransfer.endpoint.loop import EndpointLoop
from kvtransfer.layout import probe
from kvtransfer.messages import Fetch
from kvtransfer.rank_endpoint import RankEndpoint
from kvtransfer.transfers.imports import ClosedImport
from tests.unit.kvtransfer.rank_pair import BLOCK_SIZE, FACTS, PROMPT_HASH, Cluster

NUM_BLOCKS = 1024
NUM_LAYERS = 3
MAX_BLOCKS = 5
MARK, JUNK = 0xAAAA, 0xDEAD
MAY_END = {
    "plain": {"loaded": {""}},
    "cached": {"loaded": {""}},
    "cancelled": {"cancelled": {"", "unknown_transfer"}, "loaded": {""}},
    "aborted": {"recompute": {"aborted", "unknown_transfer"}, "loaded": {""}},
    "dropped": {"recompute": {"aborted", "unknown_transfer"}, "loaded": {""}},
    "unreadable": {"recompute": {"transport"}},
    "another prompt": {"recompute": {"mismatch"}},
    "never exported": {"recompute": {"unknown_transfer"}},
}
FAILING = ("unreadable", "another prompt", "never exported")
ABORTED = ("cancelled", "aborted", "dropped")
EXPORT_OUTCOMES = {"released", "expired", "dropped", "aborted"}


class Pool:
    """Who has which blocks of one cache."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self.used: dict[str, list[int]] = {}
        self.leased: dict[str, list[int]] = {}

    def take(self, transfer_id: str, num_blocks: int) -> list[int]:
        assert transfer_id not in self.used
        assert num_blocks <= len(self.free), "blocks have leaked"
        self.used[transfer_id] = [self.free.pop() for _ in range(num_blocks)]
        self.check()
        return self.used[transfer_id]

    def lease(self, transfer_id: str) -> None:
        """Its request has ended; a transfer holds the blocks."""
        self.leased[transfer_id] = self.used.pop(transfer_id)
        self.check()

    def give_back(self, transfer_id: str) -> list[int]:
        blocks = self.used.pop(transfer_id, None) or self.leased.pop(transfer_id, [])
        self.free[:0] = blocks
        self.check()
        return blocks

    def check(self) -> None:
        held = [block for blocks in (*self.used.values(), *self.leased.values()) for block in blocks]
        assert len(self.free) + len(held) == len({*self.free, *held}) == NUM_BLOCKS


class Life:
    """One life of a rank: an endpoint, a cache, and what its engine has opened."""

    def __init__(self, cluster: Cluster, name: str, number: int, link: str) -> None:
        self.number = number
        self.cache = {f"{i}": np.full((NUM_BLOCKS, 2, 2, 8 * BLOCK_SIZE), MARK, np.uint16) for i in range(NUM_LAYERS)}
        self.pool = Pool()
        self.endpoint = RankEndpoint(
            # Long enough for a busy machine: what takes its time here is not to fail for that.
            cluster.settings(
                name,
                links=(link,),
                lease_first_s=10,
                lease_renew_s=10,
                peer_lost_after_s=10,
                attach_wait_s=0.3,
                stalled_after_s=0.8,
                verify="all" if number % 4 == 0 else "off",
            ),
            probe(self.cache, NUM_BLOCKS, FACTS),
        )
        self.open_exports: set[str] = set()
        self.open_imports: set[str] = set()

    def pattern(self, transfer: "Transfer", position: int, layer: int) -> int:
        return (self.number * 9973 + transfer.number * 131 + position * 17 + layer) % 0x8000

    def write(self, transfer: "Transfer", blocks: list[int]) -> None:
        for layer, array in enumerate(self.cache.values()):
            for position, block in enumerate(blocks):
                array[block] = self.pattern(transfer, position, layer)

    def fill(self, blocks: list[int], value: int) -> None:
        for array in self.cache.values():
            array[blocks] = value

    def is_filled(self, blocks: list[int], value: int) -> bool:
        return all((array[blocks] == value).all() for array in self.cache.values())


@dataclass(eq=False)
class Transfer:
    number: int
    fate: str
    num_tokens: int
    wants_token: bool
    knows_token: bool
    """The exporter sends it along; else only the proxy does."""
    exporter: Life | None = None
    importer: Life | None = None
    is_touched: bool = False
    """One of its ranks was restarted meanwhile, so it may end in any way."""
    closed: list[ClosedImport] = field(default_factory=list)

    @property
    def transfer_id(self) -> str:
        return f"t{self.number}"

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE)


class Storm:
    def __init__(self, directory: Path, link: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.link = link
        self._cluster = Cluster(directory)
        self._num_lives = 0
        self.exporter, self.importer = self._live("exporter"), self._live("importer")
        self.transfers: dict[str, Transfer] = {}
        self.export_outcomes: dict[str, list[str]] = {}
        self.most_open = 0
        self._stagger = 1
        self._numbers = itertools.count()
        self._being_read: set[str] = set()

    def run(self, num_transfers: int, restarts: tuple[str, ...] = (), stagger: int = 1) -> None:
        """In shuffled order, until everything has closed. `stagger`: steps over which they begin; 1 is all at once."""
        self._stagger = stagger
        transfers = [self._make(next(self._numbers)) for _ in range(num_transfers)]
        steps = [side(transfer) for transfer in transfers for side in (self._export, self._import)]
        num_begun = len(steps)
        due = {num_begun * (i + 1) // (len(restarts) + 1): side for i, side in enumerate(restarts)}
        self.most_open = 0
        with (
            patch.object(CopyThreads, "_copy", self._copy(CopyThreads._copy)),
            patch.object(EndpointLoop, "_send_blocks", self._send(EndpointLoop._send_blocks)),
        ):
            while steps:
                step = self.chance.choice(steps)
                if next(step, None) is None:
                    steps.remove(step)
                    if side := due.pop(num_begun - len(steps), ""):
                        self._restart(side)
                self.most_open = max(self.most_open, len(self.importer.open_imports))
                if self.chance.random() < 0.1:
                    time.sleep(0.001)  # for the ranks' threads to keep up
                self._collect()
            self._finish()

    def close(self) -> None:
        for life in (self.exporter, self.importer):
            life.endpoint.close(timeout_s=1)

    def _live(self, name: str) -> Life:
        self._num_lives += 1
        return Life(self._cluster, name, self._num_lives, self.link)

    def _make(self, number: int) -> Transfer:
        roll = self.chance.random()
        fate = "plain"
        if roll < 0.05:
            fate = FAILING[number % len(FAILING)]
        elif roll < 0.15:
            fate = ABORTED[number % len(ABORTED)]
        elif roll < 0.2:
            fate = "cached"
        num_tokens = self.chance.randrange(1, MAX_BLOCKS * BLOCK_SIZE)
        transfer = Transfer(number, fate, num_tokens, self.chance.random() < 0.5, self.chance.random() < 0.8)
        self.transfers[transfer.transfer_id] = transfer
        return transfer

    # The engines.

    def _export(self, transfer: Transfer) -> Iterator[bool]:
        if transfer.fate == "never exported":
            transfer.exporter = self.exporter
            return
        for _ in range(self.chance.randrange(self._stagger)):
            yield True
        life, transfer_id = self.exporter, transfer.transfer_id
        transfer.exporter = life
        blocks = life.pool.take(transfer_id, transfer.num_blocks)
        life.open_exports.add(transfer_id)
        life.endpoint.open_export(transfer_id, PROMPT_HASH, transfer.num_tokens)
        yield True
        life.write(transfer, blocks)  # in the order of a real engine: computed, then announced
        for num_blocks in range(1, len(blocks)):
            if life is not self.exporter or (transfer.fate == "aborted" and self.chance.random() < 0.2):
                break
            life.endpoint.announce(transfer_id, blocks[:num_blocks], num_blocks * BLOCK_SIZE)
            yield True
        if transfer.fate in ("aborted", "dropped"):
            yield from self._until_read(transfer_id)
        if life is not self.exporter:
            return
        if transfer.fate == "aborted":
            life.endpoint.abort_export(transfer_id, "for a test")
            return
        if transfer.fate == "dropped":
            self._drop(transfer)
            yield True
        if life is self.exporter:
            life.pool.lease(transfer_id)
            token = transfer.number if transfer.knows_token else None
            life.endpoint.finish_export(transfer_id, blocks, transfer.num_tokens, token)

    def _import(self, transfer: Transfer) -> Iterator[bool]:
        while transfer.exporter is None:  # the proxy submits it when the prefill has started
            yield True
        life, exporter, transfer_id = self.importer, transfer.exporter.endpoint, transfer.transfer_id
        transfer.importer = life
        prompt_hash = b"another" if transfer.fate == "another prompt" else PROMPT_HASH
        life.open_imports.add(transfer_id)
        life.endpoint.open_import(
            transfer_id, exporter.address, exporter.epoch, prompt_hash, transfer.num_tokens, transfer.wants_token
        )
        for _ in range(self.chance.randrange(4)):
            yield True
        if life is not self.importer:
            return
        num_blocks = 0 if transfer.fate == "cached" else transfer.num_blocks
        blocks = life.pool.take(transfer_id, num_blocks)
        assert life.is_filled(blocks, MARK), "written after the import had closed"
        life.endpoint.place_import(transfer_id, 0, blocks)
        for _ in range(self.chance.randrange(6)):
            yield True
        if transfer.fate == "cancelled":
            yield from self._until_read(transfer_id)
        if life is not self.importer:
            return
        if transfer.fate == "cancelled":
            life.endpoint.cancel_import(transfer_id)
        elif transfer.wants_token and (not transfer.knows_token or transfer.fate != "plain"):
            life.endpoint.give_first_token(transfer_id, transfer.number)

    def _until_read(self, transfer_id: str) -> Iterator[bool]:
        """Until it is being copied on link `host`, or for some steps."""
        for _ in range(self.chance.randrange(40)):
            if transfer_id in self._being_read:
                return
            yield True

    def _drop(self, transfer: Transfer) -> None:
        """What the proxy says by way of the host."""
        self.exporter.endpoint._post(self.exporter.endpoint._loop.exporter.drop, [transfer.transfer_id])

    def _restart(self, side: str) -> None:
        """On the same address, with another epoch and other data."""
        old: Life = getattr(self, side)
        for transfer in self.transfers.values():
            # One that has begun on either side and not closed yet; those to come may still mean the old life.
            has_begun = old in (transfer.exporter, transfer.importer)
            transfer.is_touched |= has_begun and not self._is_over(transfer)
        old.endpoint.close(timeout_s=self.chance.choice((0.0, 0.2)))
        self._collect_from(old, is_dead=True)
        assert not old.open_exports | old.open_imports, "a life that ends closes what it has opened"
        setattr(self, side, self._live(side))
        for transfer in self.transfers.values():
            if old is transfer.importer and transfer.exporter is self.exporter:
                self._drop(transfer)  # as the proxy does

    def _is_over(self, transfer: Transfer) -> bool:
        is_exported = transfer.fate == "never exported" or transfer.transfer_id in self.export_outcomes
        return bool(transfer.closed) and is_exported

    def _finish(self) -> None:
        until_s = time.monotonic() + 20
        while self.exporter.open_exports or self.importer.open_imports:
            assert time.monotonic() < until_s, (self.exporter.open_exports, self.importer.open_imports)
            for transfer_id in self.importer.open_imports:
                self.importer.endpoint.give_first_token(transfer_id, 1)  # the proxy has learned it
            self.importer.endpoint.wait(0.05) or self.exporter.endpoint.wait(0.05)
            self._collect()

    # What has closed.

    def _collect(self) -> None:
        for life in (self.exporter, self.importer):
            self._collect_from(life)

    def _collect_from(self, life: Life, is_dead: bool = False) -> None:
        for export in life.endpoint.take_closed_exports():
            assert export.outcome in EXPORT_OUTCOMES
            if not is_dead and export.outcome != "expired":
                assert export.transfer_id not in self._being_read, "closed under a copy"
            life.open_exports.remove(export.transfer_id)  # KeyError: closed twice, or never opened
            self.export_outcomes.setdefault(export.transfer_id, []).append(export.outcome)
            blocks = life.pool.give_back(export.transfer_id)
            if not is_dead:  # a dead process overwrites nothing
                life.fill(blocks, JUNK)
        for closed in life.endpoint.take_closed_imports():
            life.open_imports.remove(closed.transfer_id)
            transfer = self.transfers[closed.transfer_id]
            transfer.closed.append(closed)
            if closed.outcome == "loaded":
                self._require_exact(transfer, life)
            elif transfer.exporter is self.exporter:
                self._drop(transfer)  # as the proxy does
            life.fill(life.pool.give_back(closed.transfer_id), MARK)

    def _require_exact(self, transfer: Transfer, life: Life) -> None:
        blocks = life.pool.used.get(transfer.transfer_id, [])
        assert transfer.exporter
        for layer, array in enumerate(life.cache.values()):
            for position, block in enumerate(blocks):
                expected = transfer.exporter.pattern(transfer, position, layer)
                assert (array[block] == expected).all(), f"{transfer} holds other data than its exporter's"

    # Failures.

    def _is_unreadable(self, transfer_id: str) -> bool:
        return self.transfers[transfer_id].fate == "unreadable"

    def _copy(self, real: Any) -> Any:
        def copy(thread: CopyThreads, job: CopyJob) -> CopyResult:
            if self._is_unreadable(job.piece.transfer_id):
                return CopyResult(job, 0.0, time.monotonic(), "transport", "for a test")
            transfer_id = job.piece.transfer_id
            self._being_read.add(transfer_id)
            if self.transfers[transfer_id].fate in ABORTED:
                time.sleep(0.01)  # so that it is aborted during the copy
            result: CopyResult = real(thread, job)
            self._being_read.discard(transfer_id)
            return result

        return copy

    def _send(self, real: Any) -> Any:
        def send(loop: EndpointLoop, importer: bytes, fetch: Fetch) -> None:
            if not self._is_unreadable(fetch.transfer_id):
                real(loop, importer, fetch)

        return send
