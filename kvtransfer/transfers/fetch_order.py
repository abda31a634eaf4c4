"""In which order the blocks of an import are asked for, and when. No I/O.

Of every unit the layers are asked for from the first to the last, each once. Units come in token order; those of which
the exporter has only some layers follow those that it has all of.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Computed:
    """What the exporter has: all layers of the first `num_complete` units, `num_layers` of the first `num_begun`."""

    num_complete: int
    num_begun: int
    num_layers: int


@dataclass(frozen=True)
class Portion:
    """The units from `first` to before `end`, and some of their layers."""

    first: int
    end: int
    first_layer: int
    num_layers: int
    num_bytes: int


class FetchOrder:
    def __init__(self, num_units: int, layer_bytes: Sequence[int]) -> None:
        """`layer_bytes`: per layer, of one unit."""
        self._offsets = [0, *itertools.accumulate(layer_bytes)]
        self._num_asked = [0] * num_units  # layers, per unit
        self._first_open = 0  # the first unit of which some layer was not asked for
        self._cursor = 0  # no unit between that one and this has any to ask for at present
        self._computed = Computed(0, 0, 0)

    def next(self, computed: Computed, max_bytes: int) -> Portion | None:
        """What to ask for next, at most `max_bytes` unless one layer of one unit is larger; None if nothing is."""
        if computed != self._computed:
            self._computed, self._cursor = computed, self._first_open
        end = min(max(computed.num_complete, computed.num_begun), len(self._num_asked))
        while self._cursor < end and self._num_asked[self._cursor] >= self._num_computed(self._cursor):
            self._cursor += 1
        if self._cursor >= end:
            return None
        portion = self._portion(self._cursor, end, max_bytes)
        num_asked = portion.first_layer + portion.num_layers
        self._num_asked[portion.first : portion.end] = [num_asked] * (portion.end - portion.first)
        while self._first_open < end and self._num_asked[self._first_open] == self._num_layers:
            self._first_open += 1
        return portion

    @property
    def _num_layers(self) -> int:
        return len(self._offsets) - 1

    def _num_computed(self, unit: int) -> int:
        """Layers of a unit before the last one that was begun."""
        return self._num_layers if unit < self._computed.num_complete else self._computed.num_layers

    def _portion(self, first: int, end: int, max_bytes: int) -> Portion:
        """As many units alike as fit, with all layers that can be had; or of one unit as many layers as fit."""
        first_layer, last_layer = self._num_asked[first], self._num_computed(first)
        unit_bytes = self._offsets[last_layer] - self._offsets[first_layer]
        if unit_bytes > max_bytes:
            while last_layer > first_layer + 1 and self._offsets[last_layer] - self._offsets[first_layer] > max_bytes:
                last_layer -= 1
            num_bytes = self._offsets[last_layer] - self._offsets[first_layer]
            return Portion(first, first + 1, first_layer, last_layer - first_layer, num_bytes)
        most = min(end, first + max_bytes // unit_bytes)
        stop = first + 1
        while stop < most and (self._num_asked[stop], self._num_computed(stop)) == (first_layer, last_layer):
            stop += 1
        return Portion(first, stop, first_layer, last_layer - first_layer, (stop - first) * unit_bytes)
