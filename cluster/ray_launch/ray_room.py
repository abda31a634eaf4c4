"""Room that workers have claimed in a Ray cluster: one placement group per worker.

All of it is on one node, or, for a worker whose ranks may be on several, on as few as Ray finds.

A group stays while its worker is started again, so that nobody else takes the room meanwhile. When its node is lost,
Ray finds it another one.

Relies on Ray: `placement_group(_soft_target_node_id=...)`, which is a wish and works for STRICT_PACK only;
`ray._private.state.available_resources_per_node`, which is a second or so behind; the fields `state` and
`bundles_to_node_id` of `placement_group_table`; groups that are not detached end with the driver.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ray_launch.messages import Claim
from cluster.ray_launch.placing import Ask, Node, choose_nodes, needs_of, shortage

_POLL_S = 0.2
_SAY_AFTER_S = 2.0


class NoRoom(Exception):
    """Ray has no room for a worker; the text says what it wants and what there is."""


@dataclass
class _Seat:
    ask: Ask
    group: PlacementGroup
    node_id: str = ""
    """Where it is, or its first part; empty while Ray looks for a place."""


class Room:
    """All claims of a cluster run. `on_waiting` gets a text when there is no room at first."""

    def __init__(self, timeout_s: float, on_waiting: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_waiting = on_waiting
        self._seats: dict[str, _Seat] = {}

    def claim(self, wanted: Sequence[tuple[str, str, Claim]]) -> None:
        """Asks Ray for room for (worker id, role, claim); `seated` waits for it."""
        asks = [
            Ask(name, role, needs_of(claim), claim.parts) for name, role, claim in wanted if name not in self._seats
        ]
        if not asks:
            return
        seated = [(seat.node_id, seat.ask.role) for seat in self._seats.values()]
        wishes = choose_nodes([ask for ask in asks if ask.parts == 1], nodes(), seated)
        for ask in sorted(asks, key=lambda ask: ask.parts > 1):  # those last that fit into what others leave
            # A group cannot claim nothing; a worker that needs nothing still has a place.
            bundle = dict(ask.needs) or {"CPU": 0.001}
            if ask.parts > 1:
                group = placement_group([bundle] * ask.parts, "PACK")
            else:
                group = placement_group([bundle], "STRICT_PACK", _soft_target_node_id=wishes.get(ask.worker_id))
            self._seats[ask.worker_id] = _Seat(ask, group)

    async def seated(self, worker_id: str) -> PlacementGroupSchedulingStrategy:
        """Where the worker's actor is to be; raises `NoRoom` after the time limit."""
        seat = self._seats[worker_id]
        began_s = time.monotonic()
        said = False
        while not self._look(seat):
            waited_s = time.monotonic() - began_s
            if waited_s > self._timeout_s:
                text = shortage([seat.ask], nodes())
                self.release(worker_id)
                raise NoRoom(f"{text} (waited ray.claim_timeout_s={self._timeout_s:g})")
            if waited_s > _SAY_AFTER_S and not said:
                said = True
                self._on_waiting(shortage([seat.ask], nodes()))
            await asyncio.sleep(_POLL_S)
        return PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=0)

    def _look(self, seat: _Seat) -> bool:
        found: dict[str, Any] = placement_group_table(seat.group)
        seat.node_id = found["bundles_to_node_id"].get(0, "") if found.get("state") == "CREATED" else ""
        return bool(seat.node_id)

    def release(self, worker_id: str) -> None:
        """Gives a worker's room back."""
        seat = self._seats.pop(worker_id, None)
        if seat is not None:
            remove_placement_group(seat.group)

    def release_all(self) -> None:
        """Gives back everything."""
        for worker_id in list(self._seats):
            self.release(worker_id)


def nodes() -> list[Node]:
    """The living nodes of the Ray cluster."""
    free = available_resources_per_node()
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
