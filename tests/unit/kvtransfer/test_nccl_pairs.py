"""Which communicators there are, and what is sent through them in what order, without any NCCL."""

from typing import Any

import pytest

from kvtransfer.links.nccl_orders import (
    Abort,
    Broken,
    Build,
    Built,
    Gather,
    Gathered,
    IdMade,
    PairId,
    Receive,
    Received,
    Send,
    Sent,
    Skip,
)
from kvtransfer.links.nccl_pairs import MAX_TRIES, STAGING_BUFFERS, ReceivingPairs, SendingPairs
from kvtransfer.messages import CommBroken, CommOffer, CommRequest, Fetch, Sending

STAGING = 1000
IMPORTER = b"importer"


def fetch(number: int, generation: int = 1) -> Fetch:
    return Fetch("t", 0, number, 0, 1, [number], generation)


def drain(items: list[Any]) -> list[Any]:
    taken = items[:]
    items.clear()
    return taken


class Exporter:
    """Its half, with one communicator ready."""

    def __init__(self, max_pairs: int = 2) -> None:
        self.half = SendingPairs(max_pairs, STAGING, build_within_s=10.0)
        self.connect(IMPORTER)

    def connect(self, importer: bytes, now_s: float = 0.0, generation: int = 1) -> PairId:
        pair = PairId(importer, generation, is_exporter=True)
        self.half.requested(now_s, importer, CommRequest(generation, 2 * STAGING))
        self.half.id_made(IdMade(pair, b"id"))
        self.half.built(Built(pair))
        return pair


class Importer:
    def __init__(self, max_pairs: int = 2) -> None:
        self.half: ReceivingPairs[str] = ReceivingPairs(max_pairs, STAGING, build_within_s=10.0)

    def connect(self, exporter: str, now_s: float = 0.0) -> PairId:
        self.half.want(now_s, exporter)
        generation = self.half.generation(exporter)
        self.half.offered(exporter, CommOffer(generation, STAGING, b"id"))
        pair = PairId(exporter, generation, is_exporter=False)
        self.half.built(exporter, Built(pair))
        return pair


def test_a_communicator_is_requested_offered_and_built() -> None:
    importer = Importer()
    importer.half.want(0.0, "p")
    importer.half.want(0.0, "p")
    assert drain(importer.half.outbox) == [("p", CommRequest(1, STAGING))], "once"
    importer.half.offered("p", CommOffer(1, 600, b"id"))
    assert drain(importer.half.orders) == [Build(PairId("p", 1, is_exporter=False), b"id")]
    assert not importer.half.is_ready("p")
    importer.half.built("p", Built(PairId("p", 1, is_exporter=False)))
    assert importer.half.is_ready("p")
    assert importer.half.staging_bytes("p") == 600, "the smaller of the two sides' buffers"
    assert drain(importer.half.ready) == ["p"]


def test_an_exporter_offers_the_id_when_it_is_made() -> None:
    half = SendingPairs(2, STAGING, build_within_s=10.0)
    half.requested(0.0, IMPORTER, CommRequest(1, 700))
    pair = PairId(IMPORTER, 1, is_exporter=True)
    assert half.orders == [Build(pair)]
    assert half.outbox == []
    half.id_made(IdMade(pair, b"id"))
    assert half.outbox == [(IMPORTER, CommOffer(1, 700, b"id"))]
    assert half.is_busy(IMPORTER), "until it is built"


def test_sends_are_numbered_in_the_order_in_which_they_are_made() -> None:
    exporter = Exporter()
    pair = PairId(IMPORTER, 1, is_exporter=True)
    drain(exporter.half.outbox), drain(exporter.half.orders)
    for number in range(STAGING_BUFFERS):
        assert not exporter.half.is_busy(IMPORTER)
        exporter.half.gather(0.0, IMPORTER, fetch(number), ())
    assert exporter.half.is_busy(IMPORTER), "both buffers are in use"
    assert drain(exporter.half.orders) == [Gather(pair, 0, (0,), ()), Gather(pair, 1, (1,), ())]
    exporter.half.gathered(Gathered(pair, 0), 100, may_send=False)
    assert not exporter.half.is_busy(IMPORTER)
    exporter.half.gathered(Gathered(pair, 1), 200, may_send=True)
    assert drain(exporter.half.orders) == [Skip(pair, 0), Send(pair, 1)]
    assert drain(exporter.half.outbox) == [(IMPORTER, Sending(1, 0, 1, 200))], "what is skipped takes no number"
    exporter.half.sent(Sent(pair, 1))
    exporter.half.gather(0.0, IMPORTER, fetch(2), ())
    exporter.half.gathered(Gathered(pair, 2), 300, may_send=True)
    assert drain(exporter.half.outbox) == [(IMPORTER, Sending(1, 1, 2, 300))]


@pytest.mark.parametrize(
    ("sending", "expected_bytes", "reason"),
    [
        (Sending(1, 1, 7, 100), 100, "send 1 was announced where 0 had its turn"),
        (Sending(1, 0, 7, 100), 99, "100 bytes were announced for a fetch of 99"),
        (Sending(1, 0, 7, STAGING + 1), None, "1001 bytes were announced for a staging buffer of 1000"),
        (Sending(1, 0, 7, 0), None, "0 bytes were announced"),
    ],
)
def test_a_send_that_has_not_its_turn_or_size_breaks_the_communicator(
    sending: Sending, expected_bytes: int | None, reason: str
) -> None:
    importer = Importer()
    pair = importer.connect("p")
    drain(importer.half.orders), drain(importer.half.outbox)
    assert importer.half.sending(0.0, "p", sending, expected_bytes) is None
    (abort,) = importer.half.orders
    assert isinstance(abort, Abort)
    assert (abort.pair, reason in abort.reason) == (pair, True)
    broken, request = (message for _, message in importer.half.outbox)
    assert isinstance(broken, CommBroken)
    assert (broken.generation, broken.is_failure) == (1, True)
    assert request == CommRequest(2, STAGING)


def test_one_receive_belongs_to_each_send_wanted_or_not() -> None:
    importer = Importer()
    pair = importer.connect("p")
    drain(importer.half.orders)
    for number in range(3):
        sending = Sending(1, number, 10 + number, 100)
        assert importer.half.sending(0.0, "p", sending, None if number == 1 else 100) == pair
        importer.half.receive(pair, sending, () if number == 1 else (number,))
    received = [(order.fetch_id, order.block_ids) for order in importer.half.orders if isinstance(order, Receive)]
    assert received == [(10, (0,)), (11, ()), (12, (2,))]


def test_what_belongs_to_an_earlier_generation_is_ignored() -> None:
    importer = Importer()
    first = importer.connect("p")
    importer.half.broke(0.0, "p", Broken(first, "cut"))
    second = importer.half.generation("p")
    assert second == 2
    drain(importer.half.orders), drain(importer.half.outbox)
    assert importer.half.sending(0.0, "p", Sending(1, 0, 7, 100), 100) is None
    importer.half.offered("p", CommOffer(1, STAGING, b"old"))
    importer.half.dropped(0.0, "p", CommBroken(1, "old", is_failure=True))
    importer.half.built("p", Built(first))
    importer.half.broke(0.0, "p", Broken(first, "again"))
    assert (importer.half.orders, importer.half.outbox, importer.half.generation("p")) == ([], [], 2)


def test_a_pair_is_given_up_after_failing_in_a_row_but_not_for_ever_apart() -> None:
    importer = Importer()
    for number in range(MAX_TRIES - 1):
        pair = importer.connect("p")
        importer.half.broke(0.0, "p", Broken(pair, f"cut {number}"))
    pair = importer.connect("p")
    importer.half.received("p", Received(pair, 7, "", 0.1, 1.0))
    importer.half.broke(0.0, "p", Broken(pair, "cut again"))
    assert importer.half.given_up == []
    for _ in range(MAX_TRIES - 1):
        pair = importer.connect("p")
        importer.half.broke(0.0, "p", Broken(pair, "the last"))
    assert importer.half.given_up == [("p", "the last")]
    assert importer.half.generation("p") == 0


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_communicator_that_is_not_ready_in_time_is_dropped(is_offered: bool) -> None:
    importer = Importer()
    importer.half.want(0.0, "p")
    if is_offered:
        importer.half.offered("p", CommOffer(1, STAGING, b"id"))
    importer.half.sweep(9.9)
    assert importer.half.generation("p") == 1
    importer.half.sweep(10.0)
    assert importer.half.generation("p") == 2, "and requested anew"
    assert [type(order) for order in importer.half.orders] == ([Build, Abort] if is_offered else [])


def test_the_pair_idle_longest_makes_room_and_a_busy_one_never_does() -> None:
    exporter = Exporter(max_pairs=2)
    exporter.connect(b"second", now_s=1.0)
    exporter.half.gather(2.0, IMPORTER, fetch(1), ())
    exporter.half.gathered(Gathered(PairId(IMPORTER, 1, True), 1), 10, may_send=True)
    drain(exporter.half.outbox)
    exporter.connect(b"third", now_s=3.0)
    broken = exporter.half.outbox[0]
    assert broken == (b"second", CommBroken(1, "another pair needed its place", is_failure=False))
    exporter.half.gather(4.0, b"third", fetch(1), ())
    drain(exporter.half.outbox)
    exporter.half.requested(5.0, b"fourth", CommRequest(1, STAGING))
    assert exporter.half.outbox == [
        (b"fourth", CommBroken(1, "all 2 communicators of the exporter are in use", is_failure=True))
    ]


def test_an_eviction_is_no_failure_and_lasts_until_there_is_work() -> None:
    importer = Importer()
    importer.connect("p")
    drain(importer.half.outbox)
    importer.half.dropped(0.0, "p", CommBroken(1, "another pair needed its place", is_failure=False))
    assert importer.half.generation("p") == 0
    assert importer.half.outbox == []


def test_fetches_are_void_when_their_communicator_is_gone() -> None:
    exporter = Exporter()
    exporter.half.gather(0.0, IMPORTER, fetch(1), ())
    exporter.half.broke(Broken(PairId(IMPORTER, 1, True), "cut"))
    assert drain(exporter.half.broken) == [IMPORTER]
    exporter.half.gathered(Gathered(PairId(IMPORTER, 1, True), 1), 10, may_send=True)
    assert not any(isinstance(message, Sending) for _, message in exporter.half.outbox)
    exporter.connect(IMPORTER, generation=2)
    assert not exporter.half.is_busy(IMPORTER)
