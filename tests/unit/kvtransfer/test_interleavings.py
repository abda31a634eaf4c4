"""One transfer between an exporter and an importer, in every order in which things can happen to it.

The network, the copies, the engines and the clock are simulated, one event at a time. The exporter's engine overwrites
blocks as soon as it may, so that a copy that should not have been trusted shows.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.copy_plan import CopyPlan, plan_copy
from kvtransfer.endpoint.copy_threads import CopyJob, CopyResult
from kvtransfer.endpoint.exporting.exporter import Exporter
from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.endpoint.peers import PeerKey, RankIdentity
from kvtransfer.layout import Region, probe
from kvtransfer.links.zmq_frames import gather, scatter
from kvtransfer.messages import Blocks, FromExporter, FromImporter
from kvtransfer.region_runs import LayerRegions
from kvtransfer.transfers.imports import Piece
from tests.unit.kvtransfer.rank_pair import BLOCK_SIZE, FACTS, NUM_BLOCKS, NUM_LAYERS, PROMPT_HASH, Cluster, make_cache

JUNK = 0xDEAD
NUM_TOKENS = 3 * BLOCK_SIZE - 1
KEY = PeerKey("address", "exporter")
TARGETS = [10, 11, 12]


class World:
    """An exporter, an importer, and all that is under way between them and their engines."""

    def __init__(self, link: str, first_block: int, wants_first_token: bool, announces_layers: bool = False) -> None:
        options = replace(
            Cluster(Path("unused")).settings(), links=(link,), lease_first_s=12, lease_renew_s=10, beat_s=3,
            peer_lost_after_s=1e9, stalled_after_s=1e9, attach_wait_s=5, fetch_window=2, chunk_bytes=1600,
        )  # fmt: skip
        self.now_s = 0.0
        self.theirs, self.ours = make_cache(0), make_cache(1)
        self.their_map, self.our_map = (probe(cache, NUM_BLOCKS, FACTS) for cache in (self.theirs, self.ours))
        self.exporter = Exporter(options, self.their_map, RankIdentity("exporter", "here", 1))
        self.importer = Importer(options, self.our_map, RankIdentity("importer", "here", 2), self)
        self.to_exporter: deque[FromImporter] = deque()
        self.to_importer: deque[tuple[FromExporter, bytes | None]] = deque()
        self.copies: deque[CopyJob] = deque()
        self.half_copied: CopyJob | None = None
        self.first_block, self.wants_first_token = first_block, wants_first_token
        self.phase = "unopened"  # of the exporter's engine
        self.unheard: list[Callable[[], None]] = []  # what the exporter's engine said and its endpoint has not read
        self.blocks: list[int] = []  # the exporter's, in token order
        self.next_block = 0
        self.num_tokens = 0
        self.num_complete = 0  # of these tokens, those of which all layers are computed
        self.num_layers = NUM_LAYERS  # that are computed of the others
        self.announces_layers = announces_layers
        self.restarts = 0
        self.is_opened = self.is_placed = self.is_cancelled = self.has_token = False

    # The exporter's engine. What it says is heard by its endpoint some time later, but in order.

    def say(self, command: Callable[[], None]) -> None:
        self.unheard.append(command)

    def hear(self) -> None:
        unheard, self.unheard = self.unheard, []
        for command in unheard:
            command()

    def open(self) -> None:
        self.phase = "computing"
        self.say(lambda: self.exporter.open(self.now_s, "t", PROMPT_HASH, NUM_TOKENS))

    def compute(self) -> None:
        """The next chunk, of half a block to two; or, where layers are announced, the next layer of a chunk."""
        if self.num_layers == NUM_LAYERS:
            self.num_tokens = min(NUM_TOKENS, self.num_tokens + BLOCK_SIZE // 2 + 1)
            while len(self.blocks) * BLOCK_SIZE < self.num_tokens:
                self.blocks.append(self.next_block % 9)
                self.next_block += 1
            self.num_layers = 1 if self.announces_layers else NUM_LAYERS
        else:
            self.num_layers += 1
        if self.num_layers == NUM_LAYERS:
            self.num_complete = self.num_tokens
        self.write()
        self.announce()

    def write(self) -> None:
        for position, block in enumerate(self.blocks):
            end = min(NUM_TOKENS, (position + 1) * BLOCK_SIZE)
            for layer, cache in enumerate(self.theirs.values()):
                num_tokens = self.num_tokens if layer < self.num_layers else self.num_complete
                cache[block] = content(position, layer) if num_tokens >= end else JUNK

    def announce(self) -> None:
        blocks, num_tokens = list(self.blocks), self.num_tokens
        num_layers = self.num_layers if self.num_layers < NUM_LAYERS else None
        self.say(lambda: self.exporter.announce(self.now_s, "t", blocks, num_tokens, num_layers))

    def preempt(self) -> None:
        """Another request gets the blocks, and writes to them at once."""
        self.say(lambda: self.exporter.restart(self.now_s, "t"))
        self.restarts += 1
        self.give_back_blocks()

    def give_back_blocks(self) -> None:
        for cache in self.theirs.values():
            cache[self.blocks] = JUNK
        self.blocks, self.num_tokens, self.num_complete, self.num_layers = [], 0, 0, NUM_LAYERS

    def finish(self) -> None:
        self.phase = "finished"
        blocks = list(self.blocks)
        self.say(lambda: self.exporter.finish(self.now_s, "t", blocks, NUM_TOKENS, 7))

    def abort(self) -> None:
        """Also when finished: it wants its blocks back."""
        self.phase = "finished"
        self.say(lambda: self.exporter.abort(self.now_s, "t", "for a test"))

    def drop(self) -> None:
        self.exporter.drop(self.now_s, ["t"])

    def serve(self, is_preempted_meanwhile: bool = False) -> None:
        """The engine may start over while the bytes are gathered."""
        found = self.exporter.next_fetch()
        assert found
        fetch = found[1]
        regions = LayerRegions(self.their_map.layers).run(fetch.first_layer, fetch.num_layers)
        payload = bytes(gather(fetch.block_ids, regions, np.empty(1 << 16, dtype=np.uint8)))
        if is_preempted_meanwhile:
            self.preempt()
            payload = payload[: len(payload) // 2].ljust(len(payload), b"\xad")
        self.to_importer.append((Blocks("t", fetch.fetch_id, len(payload)), payload))

    # The importer's engine and copies.

    def open_import(self) -> None:
        self.is_opened = True
        self.importer.open(self.now_s, "t", [KEY], PROMPT_HASH, NUM_TOKENS, self.wants_first_token)

    def place(self) -> None:
        self.is_placed = True
        self.importer.place(self.now_s, "t", self.first_block, TARGETS[self.first_block :])

    def give_token(self) -> None:
        self.has_token = True
        self.importer.give_first_token(self.now_s, "t", 7)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.importer.cancel(self.now_s, "t")

    def copy_half(self) -> None:
        """A copy reads some bytes now and the others later."""
        job = self.half_copied = self.copies.popleft()
        self.read(job, first=0, end=job.piece.num_layers // 2)

    def copy_rest(self) -> None:
        job, self.half_copied = self.half_copied, None
        assert job
        self.read(job, first=job.piece.num_layers // 2, end=job.piece.num_layers)
        self.importer.copied(CopyResult(job, 0.1, self.now_s))

    def read(self, job: CopyJob, first: int, end: int) -> None:
        piece = job.piece
        targets = LayerRegions(self.our_map.layers).run(piece.first_layer, piece.num_layers)
        carry_out(plan_copy(piece.source_ids, piece.target_ids, job.sources[first:end], targets[first:end]))

    def lose_exporter(self) -> None:
        """Its connection breaks; what it had sent is lost, what we had sent may still arrive."""
        self.to_importer.clear()
        self.importer.exporter_lost(KEY, "for a test")

    # What the importer has done to memory at once.

    def why_unreadable(self, pid: int, address: int) -> str:
        return ""

    def scatter(self, piece: Piece, targets: Sequence[Region], payload: memoryview) -> None:
        scatter(payload, piece.target_ids, targets)

    # The network and the clock.

    def deliver_to_exporter(self) -> None:
        self.exporter.receive(self.now_s, b"importer", self.to_exporter.popleft())

    def deliver_to_importer(self) -> None:
        message, payload = self.to_importer.popleft()
        self.importer.receive(self.now_s, KEY, message, memoryview(payload) if payload is not None else None)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.exporter.sweep(self.now_s)
        self.importer.sweep(self.now_s)

    def can_preempt(self) -> bool:
        return self.phase == "computing" and bool(self.blocks) and self.restarts < 3

    def usual_events(self) -> list[Callable[[], object]]:
        """What leads to the end of a transfer. Never empty: time passes."""
        computing = self.phase == "computing"
        return possible(
            (bool(self.to_exporter), self.deliver_to_exporter),
            (bool(self.to_importer), self.deliver_to_importer),
            (bool(self.unheard), self.hear),
            (self.exporter.has_fetches, self.serve),
            (bool(self.copies) and self.half_copied is None, self.copy_half),
            (self.half_copied is not None, self.copy_rest),
            (self.phase == "unopened", self.open),
            (computing and self.num_complete < NUM_TOKENS, self.compute),
            (computing and self.num_complete == NUM_TOKENS, self.finish),
            (not self.is_opened, self.open_import),
            (self.is_opened and not self.is_placed and not self.is_cancelled, self.place),
            (True, lambda: self.wait(0.5)),
        )

    def delays(self) -> list[Callable[[], object]]:
        return possible(
            (self.can_preempt() and self.exporter.has_fetches, lambda: self.serve(is_preempted_meanwhile=True)),
            (self.can_preempt(), self.preempt),
            (self.can_preempt() and self.half_copied is not None, self.preempt),
            (True, lambda: self.wait(11.0)),
        )

    def endings(self) -> list[Callable[[], object]]:
        return possible(
            (self.is_opened and not self.has_token, self.give_token),
            (self.is_opened and not self.is_cancelled, self.cancel),
            (self.phase != "unopened", self.drop),
            (self.phase != "unopened", self.abort),
            (self.is_opened, self.lose_exporter),
        )

    def choose(self, chance: random.Random) -> Callable[[], object]:
        draw = chance.random()
        if draw < 0.02 and (endings := self.endings()):
            return chance.choice(endings)
        return chance.choice(self.delays() if draw < 0.14 else self.usual_events())

    def step(self, event: Callable[[], object]) -> None:
        event()
        self.importer.pump(self.now_s)
        self.flush()

    def flush(self) -> None:
        self.to_exporter += [message for _, message in self.importer.outbox]
        self.to_importer += [(message, None) for _, message in self.exporter.outbox]
        self.copies += self.importer.copies
        for done in (self.importer.outbox, self.exporter.outbox, self.importer.copies):
            done.clear()
        if self.exporter.closed:
            self.give_back_blocks()  # whatever reads them now reads junk
            assert self.phase == "finished", "closed while the engine computes"
        self.check()

    def check(self) -> None:
        assert len(self.exporter.closed) <= 1
        assert len(self.importer.closed) <= 1
        for closed in self.importer.closed:
            assert self.half_copied is None, "closed while a copy writes into its blocks"
            assert not self.copies, "closed while a copy is to come"
            good = set(TARGETS[self.first_block :] if self.is_placed else []) - set(closed.bad_block_ids)
            for block in good:
                for layer, cache in enumerate(self.ours.values()):
                    assert (cache[block] == content(TARGETS.index(block), layer)).all(), "closed over wrong data"
            if closed.outcome == "loaded":
                assert closed.bad_block_ids == []


def possible(*events: tuple[bool, Callable[[], object]]) -> list[Callable[[], object]]:
    return [event for is_possible, event in events if is_possible]


def content(position: int, layer: int) -> int:
    return 100 * (position + 1) + layer


def carry_out(plan: CopyPlan) -> None:
    for target, source, length in zip(plan.targets.tolist(), plan.sources.tolist(), plan.lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)


NUM_WORLDS = 150


@pytest.mark.parametrize("wants_first_token", [True, False], ids=["token", "exact"])
def test_in_every_order_of_events_both_sides_close_once_and_over_true_data(link: str, wants_first_token: bool) -> None:
    for seed in range(NUM_WORLDS):
        chance = random.Random(seed)
        first_block = chance.choice([0, 0, 0, 1, 2, 3])
        world = World(link, first_block, wants_first_token, announces_layers=bool(seed % 2))
        try:
            for _ in range(chance.randrange(150)):
                world.step(world.choose(chance))
            bring_to_an_end(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def bring_to_an_end(world: World) -> None:
    """Nobody calls anything off any more: both sides must close by themselves, given time and the first token."""
    for _ in range(1000):
        world.step(world.usual_events()[0])
        if world.exporter.closed and world.importer.closed:
            break
        if world.is_opened and not world.has_token and world.now_s > 300:
            world.step(world.give_token)
    assert len(world.exporter.closed) == len(world.importer.closed) == 1


@pytest.mark.parametrize("announces_layers", [False, True], ids=["chunks", "layers"])
@pytest.mark.parametrize("first_block", [0, 2, 3])
def test_without_any_trouble_the_transfer_is_loaded(link: str, first_block: int, announces_layers: bool) -> None:
    world = World(link, first_block, wants_first_token=True, announces_layers=announces_layers)
    while not (world.exporter.closed and world.importer.closed):
        world.step(world.usual_events()[0])
    assert world.importer.closed[0].outcome == "loaded"
    assert world.exporter.closed[0].outcome == "released"
    assert world.importer.closed[0].bytes_moved == (3 - first_block) * world.our_map.layout.block_bytes
