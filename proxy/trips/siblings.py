"""The children of `n > 1` requests share one prompt: one of them fetches it, the others follow.

Pure bookkeeping: it says who must be placed, and who may follow their leader to the worker that has the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.flights.flight import Stage
from proxy.slo.party import UNANSWERED, Party
from proxy.trips.trip import Trip


@dataclass(slots=True)
class _Group:
    leader: str
    party: Party
    members: set[str] = field(default_factory=set)
    arrived: int = 0
    """Members that there were so far."""
    waiting: list[str] = field(default_factory=list)
    """Request ids in order of arrival."""
    scores: Any = None
    """The leader's prompt scores, once known; they outlive it."""


@dataclass(frozen=True, slots=True)
class Following:
    """Siblings that may go where the prompt is."""

    request_ids: tuple[str, ...]
    scores: Any


class Siblings:
    """All groups that have a living member."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._held_up: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def join(self, trip: Trip) -> bool:
        """Takes a request into its group, if it has one; True if it must wait for its leader."""
        if not trip.group:
            return False
        group = self._groups.setdefault(trip.group, _Group("", Party(trip.choices)))
        group.members.add(trip.request_id)
        group.arrived += 1
        trip.party = group.party
        if group.leader:
            group.waiting.append(trip.request_id)
            return True
        group.leader = trip.request_id
        return False

    def leader_of(self, group: str) -> str:
        """Request id of the leader; empty if there is none."""
        known = self._groups.get(group)
        return known.leader if known is not None else ""

    def following(self, leader: Trip) -> Following | None:
        """Who may follow now, given where `leader` stands; they wait no longer. None if nobody."""
        self._held_up.pop(leader.group, None)
        group = self._groups.get(leader.group)
        if group is None or group.leader != leader.request_id or not group.waiting or not _has_prompt(leader):
            return None
        group.scores = group.scores or leader.scores
        followers, group.waiting = tuple(group.waiting), []
        return Following(followers, group.scores)

    def hold_up(self, leader: Trip, request_ids: Sequence[str]) -> None:
        """These could not follow yet: there is no room for them where the prompt is."""
        group = self._groups.get(leader.group)
        if group is not None:
            group.waiting = [*request_ids, *group.waiting]
            self._held_up[leader.group] = None

    def held_up(self) -> list[str]:
        """Groups with members that wait for room where their prompt is."""
        return list(self._held_up)

    def leave(self, trip: Trip) -> str | None:
        """A request has ended. Returns the request id of the sibling that leads from now on and must be placed."""
        group = self._groups.get(trip.group)
        if group is None:
            return None
        group.members.discard(trip.request_id)
        if trip.request_id in group.waiting:
            group.waiting.remove(trip.request_id)
        heir = _succeed(group, trip)
        # Members may still be on their way here, unless the client has left or been refused.
        if not group.members and (group.arrived >= trip.choices or trip.account.outcome in UNANSWERED):
            del self._groups[trip.group]
            self._held_up.pop(trip.group, None)
        return heir

    def resign(self, trip: Trip) -> str | None:
        """A request goes on alone, with a prompt of its own. Returns the sibling that leads now and must be placed."""
        group = self._groups.get(trip.group)
        return _succeed(group, trip) if group is not None else None


def _succeed(group: _Group, leader: Trip) -> str | None:
    if group.leader != leader.request_id:
        return None
    group.scores = group.scores or leader.scores
    group.leader = group.waiting.pop(0) if group.waiting else ""
    return group.leader or None


def _has_prompt(leader: Trip) -> bool:
    """Whether the worker that decodes for the leader has the whole prompt, or is about to compute it."""
    match leader.flight.stage:
        case Stage.LOCAL | Stage.DECODING:
            return True
        case Stage.HANDING_OVER | Stage.FINISHED:
            # Its report of the hand-over is on the way, or was; an output tells as much.
            return leader.num_outputs > (1 if leader.shape.first_token_mode else 0)
        case _:
            return False
