"""Which node each worker should get, and what to say when there is none. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from cluster.ray_launch.messages import Claim

_SMALLEST = 1e-6
"""Ray counts in ten-thousandths."""
_GIB = 1 << 30
_BYTES = ("memory", "object_store_memory")


@dataclass(frozen=True)
class Node:
    """A living node of the Ray cluster. Amounts by Ray's names: `CPU`, `GPU`, `memory` in bytes, and custom ones."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Ask:
    """One worker that wants to start."""

    worker_id: str
    role: str
    needs: Mapping[str, float]
    """As `Node.total`; all of it on one node."""
    parts: int = 1
    """So many times that, each on any node."""


@dataclass
class _Room:
    node: Node
    free: dict[str, float]
    roles: Counter[str] = field(default_factory=Counter)

    def has(self, needs: Mapping[str, float]) -> bool:
        return all(self.free.get(name, 0.0) + _SMALLEST >= amount for name, amount in needs.items())

    def take(self, ask: Ask) -> None:
        self.roles[ask.role] += 1
        for name, amount in ask.needs.items():
            self.free[name] = self.free.get(name, 0.0) - amount


def needs_of(claim: Claim) -> dict[str, float]:
    """A claim by Ray's names."""
    amounts = {"GPU": claim.gpus, "CPU": claim.cpus, **claim.others}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def choose_nodes(asks: Sequence[Ask], nodes: Sequence[Node], seated: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """A node for every worker that has one, by worker id; the largest workers choose first.

    Workers of one role go to different nodes where they can, and prefill and decode workers likewise.

    Args:
        asks: workers without a node.
        nodes: with what is free besides the workers that have one.
        seated: (node id, role) of those.
    """
    rooms = {node.node_id: _Room(node, dict(node.free)) for node in nodes}
    for node_id, role in seated:
        if node_id in rooms:
            rooms[node_id].roles[role] += 1
    chosen: dict[str, str] = {}
    for ask in sorted(asks, key=_size, reverse=True):
        fitting = [room for room in rooms.values() if room.has(ask.needs)]
        if fitting:
            best = min(fitting, key=lambda room: (room.roles[ask.role], room.roles.total(), -room.free.get("GPU", 0.0)))
            best.take(ask)
            chosen[ask.worker_id] = best.node.node_id
    return chosen


def _size(ask: Ask) -> tuple[float, float, float]:
    needs = ask.needs
    return needs.get("GPU", 0.0), needs.get("CPU", 0.0), sum(needs.values())


def shortage(asks: Sequence[Ask], nodes: Sequence[Node]) -> str:
    """One paragraph: who waits, for what, what there is, and what to do."""
    kinds: dict[tuple[str, str], list[Ask]] = {}
    for ask in asks:
        kinds.setdefault((ask.role, _wanted(ask)), []).append(ask)
    waiting = "; ".join(
        f"{', '.join(ask.worker_id for ask in same)}: {what}{' each' if len(same) > 1 else ''}"
        for (_, what), same in kinds.items()
    )
    there = "; ".join(f"{node.address}: {_left(node, asks)}" for node in nodes) or "no node that is alive"
    return f"Ray has no room for {waiting}. What it has: {there}. {_remedy(asks, nodes)}"


def _wanted(ask: Ask) -> str:
    if ask.parts == 1:
        return f"{amounts(ask.needs)}, on one node"
    return f"{ask.parts} times {amounts(ask.needs)}, on any nodes"


def amounts(needs: Mapping[str, float]) -> str:
    """`8 GPU and 8 CPU`."""
    return " and ".join(f"{_number(name, amount)} {name}" for name, amount in needs.items()) or "nothing"


def _left(node: Node, asks: Sequence[Ask]) -> str:
    names = dict.fromkeys(name for ask in asks for name in ask.needs)
    return ", ".join(
        f"{_number(name, node.free.get(name, 0.0))} of {_number(name, node.total.get(name, 0.0))} {name} free"
        for name in names
    )


def _number(name: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if name in _BYTES else f"{amount:g}"


def _remedy(asks: Sequence[Ask], nodes: Sequence[Node]) -> str:
    too_large = [ask for ask in asks if sum(_times(node, ask.needs) for node in nodes) < ask.parts]
    if across := [ask for ask in too_large if ask.parts > 1]:
        role = across[0].role
        return (
            f"All nodes together have not so many: lower pools.{role}.tensor_parallel, ray.cpus_per_rank or "
            f"ray.resources.{role}, or add nodes to the Ray cluster"
        )
    if any(ask.needs.get("GPU", 0.0) > max((n.total.get("GPU", 0.0) for n in nodes), default=0.0) for ask in too_large):
        role = next(ask.role for ask in too_large)
        return (
            f"No node has so many GPUs, and one worker's ranks are on one node: lower pools.{role}.tensor_parallel, "
            f"add a larger node to the Ray cluster, or set pools.{role}.across_nodes=true if the network between its "
            "nodes can bear tensor parallelism"
        )
    if too_large:
        role = too_large[0].role
        return (
            f"No node is so large: lower ray.cpus_per_rank or ray.resources.{role}, or add a node that has that to the "
            "Ray cluster"
        )
    return "End what else uses the Ray cluster, add nodes to it, or lower pools.<role>.replicas"


def _times(node: Node, needs: Mapping[str, float]) -> float:
    """How many times an empty node has it."""
    return min((node.total.get(name, 0.0) + _SMALLEST) // amount for name, amount in needs.items()) if needs else inf
