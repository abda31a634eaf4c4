"""Workers with several ranks over real sockets, all in this process: who copies what from whom, and how it ends."""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.endpoint import copy_threads
from kvtransfer.endpoint.frames import from_importer
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.links.host_memory import read_memory
from kvtransfer.messages import Attach
from kvtransfer.rank_endpoint import ClosedExport, ClosedImport, RankEndpoint
from kvtransfer.resharding.forms import CPU_PLANES
from tests.unit.kvtransfer.rank_pair import PROMPT_HASH, Cluster, eventually
from tests.unit.kvtransfer.resharding.sharded_cache import MLA, Array, Model, RankCache

MODEL = Model(total_heads=4, head_size=8, num_layers=2)
NUM_TOKENS = 58
TOKEN = 7


class Worker:
    """An engine's ranks: what happens to a request happens on each of them."""

    def __init__(
        self, cluster: Cluster, tp_size: int, model: Model, block_size: int, layout: str, **changes: Any
    ) -> None:
        self.block_size = block_size
        self.caches = [RankCache(model, rank, tp_size, block_size, layout, 24) for rank in range(tp_size)]
        self.endpoints = []
        for rank, cache in enumerate(self.caches):
            settings: EndpointSettings = cluster.settings(**{"rank": rank, **changes})
            self.endpoints.append(RankEndpoint(settings, cache.map))
        self._imports: list[dict[str, ClosedImport]] = [{} for _ in self.endpoints]
        self._exports: list[dict[str, ClosedExport]] = [{} for _ in self.endpoints]

    @property
    def addresses(self) -> list[tuple[str, str]]:
        return [(endpoint.address, endpoint.epoch) for endpoint in self.endpoints]

    def blocks(self, num_tokens: int, chance: random.Random) -> list[int]:
        return chance.sample(range(24), -(-num_tokens // self.block_size))

    def compute(self, transfer_id: str, prompt: Array, block_ids: list[int], token: int | None = TOKEN) -> None:
        """Prefill in two chunks, announcing the first."""
        half = prompt.shape[1] // 2
        for endpoint, cache in zip(self.endpoints, self.caches, strict=True):
            endpoint.open_export(transfer_id, PROMPT_HASH, prompt.shape[1])
            cache.write(prompt, block_ids)
            endpoint.announce(transfer_id, block_ids[: -(-half // self.block_size)], half)
            endpoint.finish_export(transfer_id, block_ids, prompt.shape[1], token)

    def attach(self, transfer_id: str, exporter: "Worker", num_tokens: int, wants_first_token: bool = True) -> None:
        for endpoint in self.endpoints:
            endpoint.open_sharded_import(transfer_id, exporter.addresses, PROMPT_HASH, num_tokens, wants_first_token)

    def place(self, transfer_id: str, block_ids: list[int], first_block: int = 0) -> None:
        for endpoint in self.endpoints:
            endpoint.place_import(transfer_id, first_block, block_ids)

    def closed_imports(self, transfer_id: str = "t", timeout_s: float = 5.0) -> list[ClosedImport]:
        eventually(lambda: self._collect() or all(transfer_id in closed for closed in self._imports), timeout_s)
        return [closed[transfer_id] for closed in self._imports]

    def closed_exports(self, transfer_id: str = "t", timeout_s: float = 5.0) -> list[str]:
        eventually(lambda: self._collect() or all(transfer_id in closed for closed in self._exports), timeout_s)
        return [closed[transfer_id].outcome for closed in self._exports]

    @property
    def num_exports_closed(self) -> int:
        self._collect()
        return sum(map(len, self._exports))

    def _collect(self) -> bool:
        for rank, endpoint in enumerate(self.endpoints):
            for imported in endpoint.take_closed_imports():
                assert imported.transfer_id not in self._imports[rank], "an import closes once"
                self._imports[rank][imported.transfer_id] = imported
            for exported in endpoint.take_closed_exports():
                assert exported.transfer_id not in self._exports[rank], "an export closes once"
                self._exports[rank][exported.transfer_id] = exported
        return False

    def holds(self, prompt: Array, block_ids: list[int]) -> bool:
        return all(
            np.array_equal(cache.read(block_ids, prompt.shape[1]), cache.expected(prompt)) for cache in self.caches
        )

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close(timeout_s=1)


@dataclass
class Workers:
    cluster: Cluster
    link: str

    def __post_init__(self) -> None:
        self.all: list[Worker] = []

    def start(
        self, tp_size: int, model: Model = MODEL, block_size: int = 16, layout: str = "LBHNC", **changes: Any
    ) -> Worker:
        worker = Worker(self.cluster, tp_size, model, block_size, layout, links=(self.link,), **changes)
        self.all.append(worker)
        return worker


@pytest.fixture
def workers(cluster: Cluster, link: str) -> Iterator[Workers]:
    workers = Workers(cluster, link)
    yield workers
    for worker in workers.all:
        worker.close()


def hand_over(
    exporter: Worker, importer: Worker, model: Model = MODEL, num_tokens: int = NUM_TOKENS
) -> list[ClosedImport]:
    """One transfer from beginning to end; fails unless every rank got its heads of every token."""
    chance = random.Random(num_tokens)
    prompt = model.prompt(num_tokens, seed=num_tokens)
    theirs, ours = exporter.blocks(num_tokens, chance), importer.blocks(num_tokens, chance)
    importer.attach("t", exporter, num_tokens)
    importer.place("t", ours)
    exporter.compute("t", prompt, theirs)
    closed = importer.closed_imports()
    assert [(c.outcome, c.first_token, c.bad_block_ids) for c in closed] == [("loaded", TOKEN, [])] * len(closed)
    assert importer.holds(prompt, ours)
    return closed


@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4), (8, 2), (2, 8), (8, 8)], ids=str)
def test_every_rank_gets_its_heads_and_every_exporter_its_blocks_back(workers: Workers, tp: tuple[int, int]) -> None:
    exporter, importer = (workers.start(size, lease_first_s=30) for size in tp)
    closed = hand_over(exporter, importer)
    assert exporter.closed_exports(timeout_s=2) == ["released"] * tp[0], "none waits for its lease to run out"
    assert {c.link for c in closed} == {workers.link}
    num_units = -(-NUM_TOKENS // 16)
    for rank, cache in zip(closed, importer.caches, strict=True):
        assert rank.bytes_moved == num_units * cache.map.layout.block_bytes, "every byte moved once"


@pytest.mark.parametrize("layout", ["LBNHC", "LHBNC", CPU_PLANES])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
def test_block_sizes_and_ranks_may_differ_at_once(workers: Workers, sizes: tuple[int, int], layout: str) -> None:
    exporter = workers.start(2, block_size=sizes[0], layout=layout)
    importer = workers.start(4, block_size=sizes[1], layout=layout)
    hand_over(exporter, importer)
    assert set(exporter.closed_exports()) == {"released"}


@pytest.mark.parametrize("tp", [(1, 4), (4, 1), (2, 4)], ids=str)
def test_a_latent_cache_is_read_from_one_rank_and_released_on_all(workers: Workers, tp: tuple[int, int]) -> None:
    exporter, importer = (workers.start(size, MLA, lease_first_s=30) for size in tp)
    hand_over(exporter, importer, MLA)
    assert exporter.closed_exports(timeout_s=2) == ["released"] * tp[0]


def test_a_cached_prefix_is_not_fetched_from_any_rank(workers: Workers) -> None:
    exporter, importer = workers.start(2, block_size=16), workers.start(1, block_size=32)
    prompt = MODEL.prompt(58)
    importer.attach("t", exporter, 58)
    importer.place("t", [9], first_block=1)
    exporter.compute("t", prompt, [4, 5, 6, 7])
    (closed,) = importer.closed_imports()
    assert closed.outcome == "loaded"
    assert closed.bytes_moved == importer.caches[0].map.layout.block_bytes
    assert np.array_equal(importer.caches[0].read([9], 26), prompt[:, 32:])


def test_with_everything_cached_no_byte_moves_and_all_leases_end(workers: Workers) -> None:
    exporter, importer = workers.start(2, lease_first_s=30), workers.start(4)
    importer.attach("t", exporter, 32)
    importer.place("t", [], first_block=2)
    exporter.compute("t", MODEL.prompt(32), [4, 5])
    assert {(c.outcome, c.first_token, c.bytes_moved) for c in importer.closed_imports()} == {("loaded", TOKEN, 0)}
    assert exporter.closed_exports(timeout_s=2) == ["released"] * 2


def test_the_blocks_stay_until_the_last_importer_rank_released_them(workers: Workers) -> None:
    exporter, importer = workers.start(1), workers.start(2)
    importer.attach("t", exporter, 32)
    exporter.compute("t", MODEL.prompt(32), [4, 5])
    importer.endpoints[0].place_import("t", 0, [1, 2])
    eventually(lambda: importer.endpoints[0].take_closed_imports())
    assert exporter.num_exports_closed == 0
    importer.endpoints[1].place_import("t", 0, [1, 2])
    assert exporter.closed_exports() == ["released"]


def test_the_blocks_stay_for_a_rank_that_has_not_even_attached(workers: Workers) -> None:
    exporter, importer = workers.start(1, lease_first_s=30), workers.start(2)
    prompt = MODEL.prompt(32)
    exporter.compute("t", prompt, [4, 5])
    for endpoint in importer.endpoints:  # the second one after the first has closed
        assert exporter.num_exports_closed == 0
        endpoint.open_sharded_import("t", exporter.addresses, PROMPT_HASH, 32, True)
        endpoint.place_import("t", 0, [1, 2])
        assert endpoint.wait(5)
    assert exporter.closed_exports(timeout_s=2) == ["released"]
    assert importer.holds(prompt, [1, 2])


def test_the_loss_of_one_exporter_rank_means_recompute_on_those_that_read_from_it(workers: Workers) -> None:
    exporter, importer = workers.start(2), workers.start(1)
    importer.attach("t", exporter, NUM_TOKENS, wants_first_token=False)
    importer.place("t", [1, 2, 3, 4])
    for endpoint in exporter.endpoints:
        endpoint.open_export("t", PROMPT_HASH, NUM_TOKENS)
        endpoint.announce("t", [7, 8], 32)
    half = 2 * importer.caches[0].map.layout.block_bytes
    eventually(lambda: sum(importer.endpoints[0].stats().bytes_in.values()) == half)
    exporter.endpoints[1]._loop._stop_by_s = 0.0  # leaves without a word
    exporter.endpoints[1]._loop.wakeup.set()
    (closed,) = importer.closed_imports(timeout_s=8)
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "peer_lost", [1, 2, 3, 4])
    exporter.endpoints[0].finish_export("t", [7, 8, 9, 10], NUM_TOKENS, TOKEN)
    eventually(lambda: [c.outcome for c in exporter.endpoints[0].take_closed_exports()] == ["released"])


def test_a_failed_shard_waits_for_the_token_of_the_proxy(workers: Workers) -> None:
    exporter, importer = workers.start(2), workers.start(1)
    importer.attach("t", exporter, 32)
    importer.place("t", [1, 2])
    for endpoint in exporter.endpoints:
        endpoint.open_export("t", PROMPT_HASH, 32)
    exporter.endpoints[0].abort_export("t", "for a test")
    eventually(lambda: not importer.endpoints[0].wait(0.05) and importer.endpoints[0].stats().imports_open == 1)
    importer.endpoints[0].give_first_token("t", 5)
    (closed,) = importer.closed_imports()
    assert (closed.outcome, closed.failure_kind, closed.first_token) == ("recompute", "aborted", 5)


def test_cancelling_releases_every_exporter_rank(workers: Workers) -> None:
    exporter, importer = workers.start(4, lease_first_s=30), workers.start(2)
    importer.attach("t", exporter, 32)
    for endpoint in importer.endpoints:
        endpoint.cancel_import("t")
    assert {c.outcome for c in importer.closed_imports()} == {"cancelled"}
    exporter.compute("t", MODEL.prompt(32), [4, 5])
    assert exporter.closed_exports(timeout_s=2) == ["released"] * 4


def test_the_token_may_come_from_any_rank_of_the_exporter(workers: Workers) -> None:
    exporter, importer = workers.start(2), workers.start(1)
    prompt = MODEL.prompt(32)
    importer.attach("t", exporter, 32)
    importer.place("t", [1, 2])
    for cache, endpoint, token in zip(exporter.caches, exporter.endpoints, (None, 9), strict=True):
        cache.write(prompt, [4, 5])
        endpoint.open_export("t", PROMPT_HASH, 32)
        endpoint.finish_export("t", [4, 5], 32, token)
    assert [c.first_token for c in importer.closed_imports()] == [9]
    assert importer.holds(prompt, [1, 2])


def test_ranks_named_in_the_wrong_order_are_noticed(workers: Workers) -> None:
    exporter, importer = workers.start(2), workers.start(2)
    exporter.compute("t", MODEL.prompt(32), [4, 5])
    for endpoint in importer.endpoints:
        endpoint.open_sharded_import("t", exporter.addresses[::-1], PROMPT_HASH, 32, False)
    importer.place("t", [1, 2])
    assert {(c.outcome, c.failure_kind) for c in importer.closed_imports()} == {("recompute", "mismatch")}


def test_a_missing_rank_is_noticed(workers: Workers) -> None:
    exporter, importer = workers.start(2), workers.start(1)
    exporter.compute("t", MODEL.prompt(32), [4, 5])
    importer.endpoints[0].open_sharded_import("t", exporter.addresses[:1], PROMPT_HASH, 32, False)
    importer.place("t", [1, 2])
    (closed,) = importer.closed_imports()
    assert (closed.outcome, closed.failure_kind) == ("recompute", "mismatch")
    assert "rank 0 of 2, named was rank 0 of 1" in closed.reason


@pytest.mark.parametrize("address", ["twice", "uneven"])
def test_ranks_that_make_no_worker_are_refused(workers: Workers, address: str) -> None:
    exporter, importer = workers.start(2), workers.start(1)
    named = exporter.addresses[:1] * 2 if address == "twice" else [("ipc://a", str(i)) for i in range(3)]
    importer.endpoints[0].open_sharded_import("t", named, PROMPT_HASH, 32, False)
    importer.place("t", [1, 2])
    (closed,) = importer.closed_imports()
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "refused", [1, 2])


def test_block_sizes_that_do_not_divide_are_refused_by_name(workers: Workers) -> None:
    exporter, importer = workers.start(2, block_size=32), workers.start(1, block_size=48)
    exporter.compute("t", MODEL.prompt(32), [4])
    importer.attach("t", exporter, 32, wants_first_token=False)
    importer.place("t", [1])
    (closed,) = importer.closed_imports()
    assert (closed.failure_kind, closed.bad_block_ids) == ("refused", [1])
    assert "block_size is 32 here and 48 there" in closed.reason


def test_a_restarted_prefill_is_copied_anew_from_every_rank(workers: Workers) -> None:
    exporter, importer = workers.start(2), workers.start(1)
    importer.attach("t", exporter, 32)
    importer.place("t", [1, 2])
    for endpoint in exporter.endpoints:
        endpoint.open_export("t", PROMPT_HASH, 32)
        endpoint.announce("t", [7], 16)
    eventually(lambda: importer.endpoints[0].stats().bytes_in)
    for endpoint in exporter.endpoints:
        endpoint.restart_export("t")
    prompt = MODEL.prompt(32)
    for cache, endpoint in zip(exporter.caches, exporter.endpoints, strict=True):
        cache.write(prompt, [8, 7])
        endpoint.finish_export("t", [8, 7], 32, TOKEN)
    assert [c.outcome for c in importer.closed_imports()] == ["loaded"]
    assert importer.holds(prompt, [1, 2])


def test_many_transfers_with_random_ends_close_once_on_every_rank(workers: Workers) -> None:
    exporter, importer = workers.start(4, lease_first_s=30), workers.start(2)
    chance = random.Random(3)
    prompts, places = {}, {}
    for number in range(12):
        transfer_id, num_tokens = f"t{number}", chance.randrange(1, 32)
        prompts[transfer_id] = MODEL.prompt(num_tokens, seed=number)
        places[transfer_id] = [2 * number, 2 * number + 1][: -(-num_tokens // 16)]
        importer.attach(transfer_id, exporter, num_tokens)
        if number % 4 == 3:
            for endpoint in importer.endpoints:
                endpoint.cancel_import(transfer_id)
        importer.place(transfer_id, places[transfer_id])
    for transfer_id in chance.sample(sorted(prompts), len(prompts)):
        exporter.compute(transfer_id, prompts[transfer_id], places[transfer_id])
    for number, (transfer_id, prompt) in enumerate(prompts.items()):
        cancelled = number % 4 == 3
        expected = {"cancelled"} if cancelled else {"loaded"}
        assert {closed.outcome for closed in importer.closed_imports(transfer_id)} == expected
        assert cancelled or importer.holds(prompt, places[transfer_id])
        assert exporter.closed_exports(transfer_id) == ["released"] * 4
    for endpoint in (*importer.endpoints, *exporter.endpoints):
        stats = endpoint.stats()
        assert (stats.bad_frames, stats.failures) == (0, {})


def test_an_exporter_is_told_how_many_will_attach(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = []

    def reading(frame: bytes | memoryview) -> object:
        message = from_importer(frame)
        if isinstance(message, Attach):
            expected.append(message.importers_expected)
        return message

    monkeypatch.setattr("kvtransfer.endpoint.loop.from_importer", reading)
    hand_over(workers.start(2), workers.start(8))
    assert expected == [4] * 8


def test_a_cancelled_load_closes_only_after_the_copies_of_all_shards_are_quiet(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, arrived = threading.Event(), threading.Event()

    def slow(pid: int, plan: Any) -> None:
        arrived.set()
        assert gate.wait(5)
        read_memory(pid, plan)

    monkeypatch.setattr(copy_threads, "read_memory", slow)
    workers = Workers(cluster, "host")
    exporter, importer = workers.start(2), workers.start(1)
    try:
        importer.attach("t", exporter, 32)
        importer.place("t", [1, 2])
        exporter.compute("t", MODEL.prompt(32), [4, 5])
        assert arrived.wait(5)
        importer.endpoints[0].cancel_import("t")
        assert not importer.endpoints[0].wait(0.2)
        gate.set()
        assert [c.outcome for c in importer.closed_imports()] == ["cancelled"]
        assert exporter.closed_exports() == ["released"] * 2
    finally:
        gate.set()
        for worker in workers.all:
            worker.close()


def test_workers_of_one_rank_still_need_no_form(cluster: Cluster, directory: Path) -> None:
    """Caches that cannot be cut go to equal ones only, and only rank by rank."""
    exporter, importer = cluster.rank(), cluster.rank()
    assert exporter.map.layout.form is None
    importer.endpoint.open_sharded_import("t", [("ipc://a", "a"), ("ipc://b", "b")], PROMPT_HASH, 8, False)
    importer.endpoint.place_import("t", 0, [1, 2])
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind) == ("recompute", "refused")
    assert "cannot be cut" in closed.reason
