"""One verified transfer in every order in which things can happen to it: no false alarm, no bad block that counts."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.endpoint.peers import RankIdentity
from kvtransfer.links.zmq_frames import HostMemory
from kvtransfer.transfers.imports import Import
from kvtransfer.verification.check_thread import CheckJob, CheckResult
from kvtransfer.verification.checksums import checksums
from tests.unit.kvtransfer.test_interleavings import TARGETS, World, bring_to_an_end, possible

NUM_WORLDS = 100


class VerifyingWorld(World):
    """Checksums are computed over what lies in the caches at that moment, which may be another request's by then."""

    def __init__(self, link: str, first_block: int, wants_first_token: bool, verify: str) -> None:
        super().__init__(link, first_block, wants_first_token)
        options = replace(self.importer._settings, verify=verify)
        self.importer = Importer(options, self.our_map, RankIdentity("importer", "here", 2), self)
        self.checks: deque[CheckJob] = deque()
        self.bad_target: int | None = None  # of which a copy goes wrong

    def compute_checksums(self) -> None:
        job = self.checks.popleft()
        memory = HostMemory()
        result = CheckResult(job, checksums(memory, job.block_ids, job.layers, 1 << 16))
        if job.importer is None:
            self.importer.checked(self.now_s, result)
        else:
            self.exporter.checked(result)

    def step(self, event: Callable[[], object]) -> None:
        super().step(lambda: (event(), self.spoil()))

    def spoil(self) -> None:
        if self.bad_target is not None and any(reader.wants_check for reader in self.shards()):
            self.ours["layers.0.attention"][self.bad_target] ^= 1
            self.bad_target = None

    def shards(self) -> list[Import]:
        return [shard for whole in self.importer._imports.values() for shard in whole.shards]

    def usual_events(self) -> list[Callable[[], object]]:
        return [*possible((bool(self.checks), self.compute_checksums)), *super().usual_events()]

    def flush(self) -> None:
        for jobs in (self.importer.checks.jobs, self.exporter.checks.jobs):
            self.checks += jobs
            jobs.clear()
        super().flush()


def test_in_every_order_of_events_there_is_no_false_alarm(link: str) -> None:
    num_compared = 0
    for seed in range(NUM_WORLDS):
        chance = random.Random(seed)
        verify = chance.choice(["sample", "all"])
        world = VerifyingWorld(link, chance.choice([0, 0, 0, 1, 2, 3]), bool(seed % 2), verify)
        try:
            for _ in range(chance.randrange(150)):
                world.step(world.choose(chance))
            bring_to_an_end(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert world.importer.closed[0].failure_kind != "checksum", f"seed {seed}"
        num_compared += world.importer.checks._last_id
    assert num_compared > NUM_WORLDS // 10


def test_in_every_order_of_events_a_bad_block_never_counts(link: str) -> None:
    num_found = 0
    for seed in range(NUM_WORLDS):
        chance = random.Random(seed)
        world = VerifyingWorld(link, chance.choice([0, 0, 1]), bool(seed % 2), "all")
        world.bad_target = chance.choice(TARGETS[world.first_block :])
        for _ in range(chance.randrange(150)):
            world.step(world.choose(chance))
        bring_to_an_end(world)  # and checks, after each event, that what counts is right
        num_found += world.importer.closed[0].failure_kind == "checksum"
    assert num_found > NUM_WORLDS // 10
