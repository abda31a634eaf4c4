"""A large transfer does not hold up a small one, and nothing spins while there is nothing to do. Counts, no timing."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.endpoint.copy_threads import CopyJob, CopyResult, CopyThreads
from kvtransfer.endpoint.loop import EndpointLoop
from kvtransfer.endpoint.peers import next_piece
from kvtransfer.messages import Fetch
from kvtransfer.transfers.fetch_turns import FetchTurns
from tests.unit.kvtransfer.rank_pair import BLOCK_SIZE, NUM_BLOCKS, Cluster, Rank, eventually, is_known_whole

LARGE = list(range(NUM_BLOCKS - 1))
SMALL = [NUM_BLOCKS - 1]
ONE_BLOCK = {"host": 200, "zmq": 800}
"""`chunk_bytes` with which every block is a piece of its own; a copy takes 4 chunks."""


class Order:
    """Of the pieces, by transfer, as they are copied or sent. The first one waits until it may."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def note(self, transfer_id: str) -> None:
        self.pieces.append(transfer_id)
        self.has_begun.set()
        assert self.may_go_on.wait(10)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    order = Order()
    copy, send = CopyThreads._copy, EndpointLoop._send_blocks

    def noted_copy(thread: CopyThreads, job: CopyJob) -> CopyResult:
        order.note(job.piece.transfer_id)
        return copy(thread, job)

    def noted_send(loop: EndpointLoop, importer: bytes, fetch: Fetch) -> None:
        order.note(fetch.transfer_id)
        send(loop, importer, fetch)

    monkeypatch.setattr(CopyThreads, "_copy", noted_copy)
    monkeypatch.setattr(EndpointLoop, "_send_blocks", noted_send)
    yield order
    order.may_go_on.set()


@pytest.mark.parametrize("same_importer", [True, False], ids=["same importer", "another importer"])
def test_one_block_overtakes_a_large_transfer(cluster: Cluster, order: Order, link: str, same_importer: bool) -> None:
    options: dict[str, Any] = {"links": (link,), "chunk_bytes": ONE_BLOCK[link], "stalled_after_s": 20}
    exporter, busy = cluster.rank(**options), cluster.rank(**options)
    other = busy if same_importer else cluster.rank(**options)
    exporter.export("large", LARGE, len(LARGE) * BLOCK_SIZE)
    exporter.export("small", SMALL, BLOCK_SIZE)
    busy.attach("large", exporter, len(LARGE) * BLOCK_SIZE)
    other.attach("small", exporter, BLOCK_SIZE)
    eventually(lambda: is_known_whole(busy, "large") and is_known_whole(other, "small"))
    busy.endpoint.place_import("large", 0, LARGE)
    assert order.has_begun.wait(10)
    other.endpoint.place_import("small", 0, SMALL)
    time.sleep(0.05)  # for what it asks to be on its way, as far as it goes
    order.may_go_on.set()
    assert other.closed_import("small").outcome == busy.closed_import("large").outcome == "loaded"
    assert order.pieces.count("large") == len(LARGE)
    assert order.pieces.index("small") <= 2 * 4, "credits of the large one, and those the exporter had taken up"


class Endless:
    """A transfer that always has another piece to fetch."""

    def __init__(self, transfer_id: str, priority: int = 0) -> None:
        self.transfer_id, self.priority, self.last_turn = transfer_id, priority, 0

    def next_piece(self, piece_id: int, max_bytes: int) -> tuple[int, int]:
        return piece_id, max_bytes


def served(pieces: int, *transfers: Endless) -> list[str]:
    """Whose piece comes next each time that one copy has ended, with an exporter for each transfer."""
    peers: list[Any] = [SimpleNamespace(with_work={transfer.transfer_id: transfer}) for transfer in transfers]
    turns = FetchTurns()
    found = [next_piece(peers, turns, number, 1) for number in range(pieces)]
    return [work[1].transfer_id for work in found if work is not None]


def test_from_one_copy_to_the_next_every_exporter_has_its_turn() -> None:
    assert served(6, Endless("large"), Endless("small")) == ["large", "small"] * 3


def test_a_better_priority_goes_first_whichever_exporter_it_comes_from() -> None:
    assert served(3, Endless("plain"), Endless("urgent", priority=-1)) == ["urgent"] * 3


class Polls:
    """Counts how often an endpoint's thread wakes up."""

    def __init__(self, rank: Rank) -> None:
        self.count = 0
        poller = rank.endpoint._loop._poller
        self._poll = poller.poll
        poller.poll = self._counted  # type: ignore[method-assign]

    def _counted(self, timeout_ms: int | None = None) -> Any:
        self.count += 1
        return self._poll(timeout_ms)


def polls_during(seconds: float, *ranks: Rank) -> list[int]:
    """By each of them."""
    polls = [Polls(rank) for rank in ranks]
    time.sleep(0.1)  # the poll under way is not counted
    before = [counter.count for counter in polls]
    time.sleep(seconds)
    return [counter.count - count for counter, count in zip(polls, before, strict=True)]


def test_connected_ranks_without_transfers_sleep(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(), cluster.rank()
    exporter.export("t", [1], 4)
    importer.import_("t", exporter, [1], num_tokens=4)
    assert importer.closed_import().outcome == "loaded"
    exporter.closed_export()
    time.sleep(0.2)  # for the last statistics
    assert max(polls_during(0.5, exporter, importer)) <= 1


def test_held_leases_cost_ten_looks_a_second_however_many_they_are(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(lease_first_s=30), cluster.rank()
    for number in range(50):
        exporter.export(f"t{number}", [number], 4)
        importer.attach(f"t{number}", exporter, num_tokens=4)  # queued: no place yet
    eventually(lambda: is_known_whole(importer, "t49"))
    assert max(polls_during(0.6, exporter, importer)) <= 6 + 3 * 2 + 1, "sweeps, and a beat with its answer every 0.3 s"
