"""Which connections to a listening socket were turned away, from what ZMQ's monitor tells. No I/O, no clock.

Most refusals are told as such. A peer that begins like no version of ZMQ with encryption does is only accepted and
disconnected again, and nothing links the two to a handshake that succeeded; so those are found by counting.
"""

from collections import Counter, OrderedDict

import zmq

_REASONS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "unknown_key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "no_valid_handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "left_or_silent",
}
"""`unknown_key`: a key pair of its own. `no_valid_handshake`: no encryption, the wrong server key, something forged or
repeated. `left_or_silent`: it went away, or said nothing for too long."""
_ACCEPTED, _DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
EVENTS = _ACCEPTED | _DISCONNECTED | _SUCCEEDED | sum(_REASONS)


class Handshakes:
    """`refused` counts connections by reason. Every accepted one succeeds, is refused, or is under way for a while."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: no handshake takes longer, including the time until it is told here."""
        self.refused: Counter[str] = Counter()
        self._limit_s = limit_s
        # Descriptor of the connection -> when it was accepted, oldest first; not for longer than a handshake takes.
        self._open: OrderedDict[int, float] = OrderedDict()
        self._undecided = 0

    def take(self, event: int, value: int, now_s: float) -> None:
        """One event of the monitor, in order; `value` is as ZMQ gives it."""
        if event == _ACCEPTED:
            self._undecided += 1
            self._open[value] = now_s
            self._open.move_to_end(value)
        elif event == _DISCONNECTED:
            self._open.pop(value, None)
        elif event == _SUCCEEDED:
            self._undecided -= 1
        elif reason := _REASONS.get(event):
            self._undecided -= 1
            self.refused[reason] += 1
        while self._open and now_s - next(iter(self._open.values())) > self._limit_s:
            self._open.popitem(last=False)
        if (gone := self._undecided - len(self._open)) > 0:
            self._undecided -= gone
            self.refused["no_valid_handshake"] += gone
