"""Whose blocks are copied next, among transfers that want some. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

FOR_EVERYBODY = 8
"""One piece of so many goes by turn alone: a transfer of the lowest priority goes on under any load."""


class Waiting(Protocol):
    """A transfer, as far as its turn goes."""

    @property
    def priority(self) -> int: ...
    @property
    def last_turn(self) -> int: ...


Transfer = TypeVar("Transfer", bound=Waiting)


@dataclass(slots=True)
class FetchTurns:
    """Priority first (lower goes before), and in turn among equals, from whichever exporter they come."""

    given: int = field(default=0)
    """Pieces so far; a transfer's turn is the number of its last one."""

    def in_order(self, waiting: Iterable[Transfer]) -> list[Transfer]:
        """The one to be served first, and those to be asked if it has nothing to fetch yet."""
        if (self.given + 1) % FOR_EVERYBODY == 0:
            return sorted(waiting, key=lambda transfer: transfer.last_turn)
        return sorted(waiting, key=lambda transfer: (transfer.priority, transfer.last_turn))

    def give(self) -> int:
        """The turn of whoever gets a piece now."""
        self.given += 1
        return self.given
