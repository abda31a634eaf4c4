"""Counting connections that were turned away."""

import zmq

from kvtransfer.trust.handshakes import Handshakes

ACCEPTED, DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
SUCCEEDED, UNKNOWN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def refused(*events: tuple[int, int, float]) -> dict[str, int]:
    handshakes = Handshakes(limit_s=10.0)
    for event, value, now_s in events:
        handshakes.take(event, value, now_s)
    return dict(handshakes.refused)


def test_who_got_in_and_left_is_not_counted() -> None:
    assert refused((ACCEPTED, 7, 0), (SUCCEEDED, 0, 0), (DISCONNECTED, 7, 99)) == {}


def test_a_refusal_that_is_told_is_counted_once() -> None:
    assert refused((ACCEPTED, 7, 0), (UNKNOWN, 400, 0), (DISCONNECTED, 7, 0)) == {"unknown_key": 1}


def test_who_is_only_accepted_and_disconnected_is_counted() -> None:
    assert refused((ACCEPTED, 7, 0), (DISCONNECTED, 7, 0)) == {"no_valid_handshake": 1}


def test_a_handshake_under_way_beside_one_that_failed_silently_is_not_counted() -> None:
    events = [(ACCEPTED, 7, 0.0), (ACCEPTED, 8, 0.0), (DISCONNECTED, 7, 0.0)]
    assert refused(*events) == {"no_valid_handshake": 1}
    assert refused(*events, (SUCCEEDED, 0, 1.0), (DISCONNECTED, 8, 20.0)) == {"no_valid_handshake": 1}


def test_a_silent_failure_is_counted_at_the_latest_when_nothing_else_can_be_under_way() -> None:
    # 8 succeeded, which may as well have been 7.
    events = [(ACCEPTED, 7, 0.0), (ACCEPTED, 8, 0.0), (SUCCEEDED, 0, 0.0), (DISCONNECTED, 7, 0.0)]
    assert refused(*events) == {}
    assert refused(*events, (ACCEPTED, 9, 11.0), (SUCCEEDED, 0, 11.0), (DISCONNECTED, 9, 12.0)) == {
        "no_valid_handshake": 1
    }


def test_connections_that_stay_are_forgotten_once_their_handshake_must_be_over() -> None:
    handshakes = Handshakes(limit_s=10.0)
    for now_s, descriptor in enumerate((7, 8, 7)):  # a descriptor may come again before its end was told
        handshakes.take(ACCEPTED, descriptor, float(now_s))
    handshakes.take(SUCCEEDED, 0, 11.5)
    assert list(handshakes._open) == [7]
    handshakes.take(SUCCEEDED, 0, 12.5)
    assert not handshakes._open
