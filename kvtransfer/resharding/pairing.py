"""Whether a prefill and a decode worker may exchange KV blocks, and if not, which fields of their layouts forbid it.

Fields are names and texts, as `CacheLayout.fields` writes them, so that anybody who has them can decide.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RESHARDED = frozenset({"tp_size", "num_kv_heads", "layout_name", "block_shapes", "axis_orders", "block_runs"})
"""May differ between caches that can be cut by heads: what follows from the number of ranks and the size of a block."""


@dataclass(frozen=True)
class Difference:
    """A field that forbids the pairing. A value is None where the field is unknown."""

    name: str
    exporter: str | None
    importer: str | None
    why: str = ""

    def __str__(self) -> str:
        """`kv_dtype (bfloat16 / fp8)`: the exporter's value first."""
        return f"{self.name} ({self.exporter} / {self.importer}{self.why and f'; {self.why}'})"


def differing_fields(exporter: Mapping[str, str], importer: Mapping[str, str]) -> list[Difference]:
    """The fields that forbid this pair, in alphabetical order; none when it is compatible."""
    can_cut = all(side.get("memory_order") for side in (exporter, importer))
    forbidding = []
    for name in sorted(exporter.keys() | importer.keys()):
        theirs, ours = exporter.get(name), importer.get(name)
        if theirs == ours or (can_cut and name in RESHARDED):
            continue
        if can_cut and name == "memory_order" and _orders_agree(theirs, ours):
            continue
        why = ""
        if can_cut and name == "block_size" and not (why := _why_uncuttable(exporter, importer)):
            continue
        forbidding.append(Difference(name, theirs, ours, why))
    return forbidding


def _orders_agree(one: str | None, other: str | None) -> bool:
    """An axis with one entry, as the heads of a rank that has one, has no place in the order."""
    first, second = (one or "").split(", "), (other or "").split(", ")
    return [axis for axis in first if axis in second] == [axis for axis in second if axis in first]


def _why_uncuttable(exporter: Mapping[str, str], importer: Mapping[str, str]) -> str:
    """Why blocks of these two sizes cannot be cut to one size; empty when they can."""
    try:
        sizes = [int(side["block_size"]) for side in (exporter, importer)]
    except (KeyError, ValueError):
        return "not a number"
    if min(sizes) < 1 or max(sizes) % min(sizes):
        return "neither divides the other"
    if not exporter.get("cuttable_blocks") == importer.get("cuttable_blocks") == "yes":
        return f"blocks of {exporter.get('attention_backend')} cannot be cut between tokens"
    return ""
