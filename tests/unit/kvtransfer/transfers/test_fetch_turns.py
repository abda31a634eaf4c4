"""Whose blocks are copied next: by priority, in turn among equals, and never somebody not at all."""

import itertools
from dataclasses import dataclass

import pytest

from kvtransfer.transfers.fetch_turns import FOR_EVERYBODY, FetchTurns


@dataclass(eq=False)
class Transfer:
    name: str
    priority: int = 0
    last_turn: int = 0


def served(turns: FetchTurns, waiting: list[Transfer], pieces: int) -> list[str]:
    """Who gets each of so many pieces."""
    names = []
    for _ in range(pieces):
        first = turns.in_order(waiting)[0]
        first.last_turn = turns.give()
        names.append(first.name)
    return names


def test_equals_take_turns_and_a_newcomer_is_next() -> None:
    turns, waiting = FetchTurns(), [Transfer("a"), Transfer("b")]
    assert served(turns, waiting, 6) == ["a", "b"] * 3
    assert served(turns, [*waiting, Transfer("new")], 3) == ["new", "a", "b"]


@pytest.mark.parametrize("order", list(itertools.permutations(("gold", "plain", "batch"))))
def test_a_better_priority_goes_first_and_the_lowest_still_goes_on(order: tuple[str, ...]) -> None:
    priorities = {"gold": -5, "plain": 0, "batch": 10}
    waiting = [Transfer(name, priorities[name]) for name in order]
    names = served(FetchTurns(), waiting, 10 * FOR_EVERYBODY)
    assert names[: FOR_EVERYBODY - 1] == ["gold"] * (FOR_EVERYBODY - 1)
    assert names.count("gold") > 8 * FOR_EVERYBODY
    assert min(names.count("plain"), names.count("batch")) >= 4


def test_whoever_has_nothing_to_fetch_yet_keeps_nobody_from_his_turn() -> None:
    turns, idle, busy = FetchTurns(), Transfer("idle", priority=-1), Transfer("busy")
    assert [t.name for t in turns.in_order([busy, idle])] == ["idle", "busy"], "both are asked"
