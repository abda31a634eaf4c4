"""Who keeps an exporter's blocks alive, and until when. Pure: time comes in as an argument, in monotonic seconds.

While the prefill computes, the engine itself holds the blocks. From its end they are held by the lease alone, until
every importer has released them, the time is up, or somebody calls it off. An importer that reads our memory by itself
may be in the middle of a copy when that happens: the lease is then `ENDING` until it says it stopped, is dead, or its
own right to read has run out (it discards what it read later than that).
"""

from enum import Enum


class LeaseState(Enum):
    COMPUTING = "computing"
    UNWANTED = "unwanted"
    """Still computing, but nobody will fetch."""
    HELD = "held"
    """The prefill has ended; nothing but this lease holds the blocks."""
    ENDING = "ending"
    """Called off; an importer may still be reading."""
    CLOSED = "closed"
    """The blocks may be freed. `Lease.outcome` tells why."""


class LeaseEvent(Enum):
    FINISH = "finish"
    DROP = "drop"
    ABORT = "abort"
    ALL_RELEASED = "all released"
    EXPIRE = "expire"
    QUIET = "quiet"


_NEXT = {
    (LeaseState.COMPUTING, LeaseEvent.FINISH): LeaseState.HELD,
    (LeaseState.COMPUTING, LeaseEvent.DROP): LeaseState.UNWANTED,
    (LeaseState.COMPUTING, LeaseEvent.ABORT): LeaseState.ENDING,
    (LeaseState.UNWANTED, LeaseEvent.FINISH): LeaseState.ENDING,
    (LeaseState.UNWANTED, LeaseEvent.DROP): LeaseState.UNWANTED,
    (LeaseState.UNWANTED, LeaseEvent.ABORT): LeaseState.ENDING,
    (LeaseState.HELD, LeaseEvent.DROP): LeaseState.ENDING,
    (LeaseState.HELD, LeaseEvent.ABORT): LeaseState.ENDING,
    (LeaseState.HELD, LeaseEvent.ALL_RELEASED): LeaseState.CLOSED,
    (LeaseState.HELD, LeaseEvent.EXPIRE): LeaseState.CLOSED,
    (LeaseState.ENDING, LeaseEvent.DROP): LeaseState.ENDING,
    (LeaseState.ENDING, LeaseEvent.ABORT): LeaseState.ENDING,
    (LeaseState.ENDING, LeaseEvent.QUIET): LeaseState.CLOSED,
}

COMPUTING_STATES = frozenset({LeaseState.COMPUTING, LeaseState.UNWANTED})
READABLE_STATES = frozenset({LeaseState.COMPUTING, LeaseState.HELD})


class IllegalTransition(RuntimeError):
    """A caller's mistake about one transfer; the transfer is left as it was."""


class Lease:
    """The lease of one export. `outcome` is empty until it is called off, then one of `OUTCOMES`."""

    OUTCOMES = ("released", "expired", "dropped", "aborted")

    def __init__(self, transfer_id: str, until_s: float) -> None:
        self.transfer_id = transfer_id
        self.state = LeaseState.COMPUTING
        self.until_s = until_s
        """Only grows: an importer that reads by itself relies on what it was once told."""
        self.outcome = ""
        self._reads_memory: dict[bytes, bool] = {}
        self._num_expected = 1
        self._released: set[bytes] = set()

    @property
    def importers(self) -> list[bytes]:
        """Those attached and not yet done."""
        return list(self._reads_memory)

    def finish(self, until_s: float) -> None:
        """The prefill ended: from here on the lease holds the blocks, at least until `until_s`."""
        self._step(LeaseEvent.FINISH)
        self.until_s = max(self.until_s, until_s)
        self._settle()

    def drop(self) -> None:
        """Nobody will fetch these blocks any more."""
        self._step(LeaseEvent.DROP, "dropped")
        self._settle()

    def abort(self) -> None:
        """The exporter withdraws the blocks."""
        self._step(LeaseEvent.ABORT, "aborted")
        self._settle()

    def attach(self, importer: bytes, reads_memory: bool, num_expected: int = 1) -> None:
        """`reads_memory`: it copies by itself, unseen by us, instead of asking for bytes.

        `num_expected`: so many importers need the blocks; those that come later must find them.
        """
        if self.state not in READABLE_STATES:
            raise IllegalTransition(f"Transfer {self.transfer_id}: an importer cannot attach when {self.state.value}.")
        self._reads_memory[importer] = reads_memory
        self._num_expected = max(self._num_expected, num_expected)

    def release(self, importer: bytes) -> None:
        """It has what it needs, or gave up, and reads no more."""
        if self._reads_memory.pop(importer, None) is not None:
            self._released.add(importer)
            self._settle()

    def lose(self, importer: bytes) -> None:
        """It is dead: it reads no more, but another may take its place while the lease lasts."""
        if self._reads_memory.pop(importer, None) is not None:
            self._settle()

    def renew(self, until_s: float) -> bool:
        """Hold at least until then. False when the lease was called off."""
        if self.state not in READABLE_STATES:
            return False
        self.until_s = max(self.until_s, until_s)
        return True

    def expire(self, now_s: float) -> bool:
        """True when the lease closed because its time is up."""
        if now_s < self.until_s:
            return False
        if self.state is LeaseState.HELD:
            self._step(LeaseEvent.EXPIRE, "expired")
            return True
        if self.state is LeaseState.ENDING:
            self._step(LeaseEvent.QUIET)
            return True
        return False

    def _settle(self) -> None:
        all_came = len(self._released) >= self._num_expected
        if self.state is LeaseState.HELD and all_came and not self._reads_memory:
            self._step(LeaseEvent.ALL_RELEASED, "released")
        elif self.state is LeaseState.ENDING and not any(self._reads_memory.values()):
            self._step(LeaseEvent.QUIET)

    def _step(self, event: LeaseEvent, outcome: str = "") -> None:
        following = _NEXT.get((self.state, event))
        if following is None:
            raise IllegalTransition(f"Transfer {self.transfer_id}: cannot {event.value} when {self.state.value}.")
        self.state = following
        self.outcome = self.outcome or outcome
