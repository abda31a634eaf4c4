from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transfers.lease import IllegalTransition, Lease, LeaseState

READER, ASKER = b"reads our memory", b"asks for bytes"
FIRST_S, RENEW_S = 30.0, 20.0

# Every way to touch a lease, as (lease, now) -> None.
ACTIONS: dict[str, Callable[[Lease, float], object]] = {
    "finish": lambda lease, now: lease.finish(now + FIRST_S),
    "drop": lambda lease, now: lease.drop(),
    "abort": lambda lease, now: lease.abort(),
    "attach reader": lambda lease, now: lease.attach(READER, True),
    "attach asker": lambda lease, now: lease.attach(ASKER, False),
    "release reader": lambda lease, now: lease.release(READER),
    "release asker": lambda lease, now: lease.release(ASKER),
    "lose reader": lambda lease, now: lease.lose(READER),
    "renew": lambda lease, now: lease.renew(now + RENEW_S),
    "soon": lambda lease, now: lease.expire(now),
    "later": lambda lease, now: lease.expire(now),
}
DURATION_S = {"soon": 1.0, "later": 31.0}


def walk(actions: list[str]) -> tuple[Lease, float]:
    """Carry the actions out, checking after each what must hold whatever came before."""
    lease, now = Lease("t", FIRST_S), 0.0
    engine_is_done = False
    for action in actions:
        now += DURATION_S.get(action, 0.0)
        before, until_before, outcome_before = lease.state, lease.until_s, lease.outcome
        reading_before = READER in lease.importers
        try:
            ACTIONS[action](lease, now)
        except IllegalTransition:
            assert lease.state is before
            continue
        engine_is_done |= action in ("finish", "abort")
        assert lease.until_s >= until_before
        assert outcome_before in ("", lease.outcome)
        if before is LeaseState.CLOSED:
            assert lease.state is LeaseState.CLOSED
        if lease.state is LeaseState.CLOSED and before is not LeaseState.CLOSED:
            assert engine_is_done, "closed while the engine still computes into the blocks"
            assert lease.outcome in Lease.OUTCOMES
            may_still_read = reading_before and action not in ("release reader", "lose reader")
            assert not may_still_read or now >= lease.until_s, "closed under a copy"
    return lease, now


@pytest.mark.parametrize("first", list(ACTIONS))
def test_no_sequence_of_four_actions_breaks_a_lease(first: str) -> None:
    """All of them, walked as a tree: state depends on the path, so every path is started afresh."""

    def extend(path: list[str]) -> None:
        walk(path)
        if len(path) < 4:
            for action in ACTIONS:
                extend([*path, action])

    extend([first])


@given(st.lists(st.sampled_from(list(ACTIONS)), max_size=25), st.sampled_from(["finish", "abort"]))
def test_every_lease_closes_once_the_engine_is_done_and_time_has_passed(actions: list[str], end: str) -> None:
    lease, now = walk(actions)
    if lease.state in (LeaseState.COMPUTING, LeaseState.UNWANTED):
        ACTIONS[end](lease, now)
    lease.expire(lease.until_s)
    assert lease.state is LeaseState.CLOSED
    assert lease.outcome in Lease.OUTCOMES


def finished(*importers: tuple[bytes, bool]) -> Lease:
    lease = Lease("t", FIRST_S)
    for importer, reads_memory in importers:
        lease.attach(importer, reads_memory)
    lease.finish(FIRST_S)
    return lease


def test_blocks_are_free_when_the_last_importer_released_them() -> None:
    lease = finished((READER, True), (ASKER, False))
    lease.release(READER)
    assert lease.state is LeaseState.HELD
    lease.release(ASKER)
    assert (lease.state, lease.outcome) == (LeaseState.CLOSED, "released")


def test_a_release_before_the_end_of_the_prefill_counts_at_its_end() -> None:
    lease = Lease("t", FIRST_S)
    lease.attach(ASKER, False)
    lease.release(ASKER)
    assert lease.state is LeaseState.COMPUTING
    lease.finish(FIRST_S)
    assert (lease.state, lease.outcome) == (LeaseState.CLOSED, "released")


def test_dropped_blocks_stay_until_the_importer_that_reads_them_stops() -> None:
    lease = finished((READER, True))
    lease.drop()
    assert lease.state is LeaseState.ENDING
    lease.release(READER)
    assert (lease.state, lease.outcome) == (LeaseState.CLOSED, "dropped")


def test_dropped_blocks_stay_at_most_as_long_as_the_importer_was_promised() -> None:
    lease = finished((READER, True))
    lease.renew(50.0)
    lease.abort()
    assert not lease.renew(1000.0)
    assert not lease.expire(49.9)
    assert lease.expire(50.0)
    assert lease.state is LeaseState.CLOSED


def test_nobody_waits_for_an_importer_that_only_asks() -> None:
    lease = finished((ASKER, False))
    lease.drop()
    assert lease.state is LeaseState.CLOSED


def test_the_death_of_the_only_importer_leaves_the_blocks_to_the_lease() -> None:
    lease = finished((READER, True))
    lease.lose(READER)
    assert lease.state is LeaseState.HELD
    assert lease.expire(FIRST_S)
    assert lease.outcome == "expired"


def test_an_unwanted_prefill_keeps_its_blocks_until_it_ends() -> None:
    lease = Lease("t", FIRST_S)
    lease.drop()
    assert not lease.expire(1000.0)
    assert lease.state is LeaseState.UNWANTED
    lease.finish(2000.0)
    assert (lease.state, lease.outcome) == (LeaseState.CLOSED, "dropped")


def test_an_illegal_transition_is_named() -> None:
    lease = finished()
    with pytest.raises(IllegalTransition, match="Transfer t: cannot finish when held"):
        lease.finish(0.0)


def test_blocks_are_held_until_every_expected_importer_has_released_them() -> None:
    lease = Lease("t", FIRST_S)
    lease.finish(FIRST_S)
    lease.attach(READER, True, num_expected=2)
    lease.release(READER)
    assert lease.state is LeaseState.HELD, "the other one may only be slow"
    lease.attach(ASKER, False, num_expected=2)
    lease.release(ASKER)
    assert (lease.state, lease.outcome) == (LeaseState.CLOSED, "released")


def test_an_expected_importer_that_never_comes_or_dies_leaves_the_blocks_to_the_clock() -> None:
    lease = Lease("t", FIRST_S)
    lease.finish(FIRST_S)
    for importer in (READER, ASKER):
        lease.attach(importer, True, num_expected=2)
    lease.release(READER)
    lease.lose(ASKER)
    assert lease.state is LeaseState.HELD
    assert lease.expire(FIRST_S)
    assert lease.outcome == "expired"
