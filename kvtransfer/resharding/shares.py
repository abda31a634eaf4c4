"""What one exporter rank and one importer rank have in common, cut into the same runs of bytes on both sides.

The *unit* of a pair is a block of the side with the smaller ones; a block of the other side is several units, with ids
`block * units_per_block + i`. Both ranks compute the share from both forms and come to the same one, so that a fetch
need not say more than units and layers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtransfer.resharding.forms import CPU_PLANES, CUTTABLE_FORMATS, CacheForm, LayerForm
from kvtransfer.resharding.heads import HeadRange, UnevenHeads, heads_of

MAX_RUNS_PER_UNIT = 4096
"""More pieces than this per layer and unit would cost more in bookkeeping than in bytes."""

_LARGEST = 1 << 48


class NotShareable(ValueError):
    """Two caches that cannot be cut into the same pieces; says why."""


@dataclass(frozen=True)
class Runs:
    """Equal runs of one layer, relative to the layer's address: unit `u` has `run_bytes` bytes at each of

    `offset + u // units_per_block * block_stride + u % units_per_block * unit_stride + run_offsets[...]`.
    """

    offset: int
    block_stride: int
    unit_stride: int
    units_per_block: int
    run_offsets: tuple[int, ...]
    run_bytes: int

    @property
    def unit_bytes(self) -> int:
        return self.run_bytes * len(self.run_offsets)


@dataclass(frozen=True)
class Units:
    """How a transfer between two ranks counts and weighs what it moves."""

    block_size: int
    """Tokens per unit."""
    layer_bytes: tuple[int, ...]
    """Per layer: bytes of one unit that the pair shares."""
    exporter_per_block: int = 1
    importer_per_block: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one unit over all layers."""
        return sum(self.layer_bytes)

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)


@dataclass(frozen=True)
class Share:
    """Per layer the runs of both sides; run `i` of a unit here belongs to run `i` of the unit there."""

    heads: HeadRange
    units: Units
    exporter: tuple[tuple[Runs, ...], ...]
    importer: tuple[tuple[Runs, ...], ...]


@dataclass(frozen=True)
class _Axis:
    name: str
    count: int
    stride: int


@dataclass(frozen=True)
class _Part:
    """An array inside every unit of a layer: `item` contiguous bytes for each entry of the axes, outermost first."""

    offset: int
    axes: tuple[_Axis, ...]
    item: int
    unit_stride: int


def share(exporter: CacheForm, exporter_rank: int, importer: CacheForm, importer_rank: int) -> Share:
    """The heads that both ranks hold, in units of the smaller block size. Raises NotShareable."""
    try:
        theirs = heads_of(exporter_rank, exporter.tp_size, exporter.total_kv_heads)
        ours = heads_of(importer_rank, importer.tp_size, importer.total_kv_heads)
    except UnevenHeads as error:
        raise NotShareable(str(error)) from error
    _require_alike(exporter, importer)
    if (theirs.count, ours.count) != (exporter.num_kv_heads, importer.num_kv_heads):
        raise NotShareable(f"{theirs.count} and {ours.count} KV heads per rank were expected")
    tokens = min(exporter.block_size, importer.block_size)
    heads = theirs.shared_with(ours)
    in_planes = exporter.content_format == CPU_PLANES and exporter.block_size != importer.block_size
    cuts = [
        _Cut(exporter, theirs, heads, tokens, in_planes),
        _Cut(importer, ours, heads, tokens, in_planes),
    ]
    known: dict[tuple[LayerForm, LayerForm], tuple[list[Runs], list[Runs]]] = {}
    layers: tuple[list[tuple[Runs, ...]], list[tuple[Runs, ...]]] = ([], [])
    for forms in zip(exporter.each_layer(), importer.each_layer(), strict=True):
        if forms not in known:
            known[forms] = _share_layer(cuts[0], forms[0], cuts[1], forms[1])
        for side, runs in zip(layers, known[forms], strict=True):
            side.append(tuple(runs))
    layer_bytes = tuple(sum(runs.unit_bytes for runs in layer) for layer in layers[0])
    units = Units(tokens, layer_bytes, exporter.block_size // tokens, importer.block_size // tokens)
    return Share(heads, units, tuple(layers[0]), tuple(layers[1]))


def _require_alike(exporter: CacheForm, importer: CacheForm) -> None:
    larger, smaller = sorted((exporter.block_size, importer.block_size), reverse=True)
    if smaller < 1 or larger % smaller:
        raise NotShareable(f"block sizes {exporter.block_size} and {importer.block_size}: neither divides the other")
    if exporter.content_format != importer.content_format:
        raise NotShareable(f"contents are {exporter.content_format} and {importer.content_format}")
    if larger != smaller and exporter.content_format not in CUTTABLE_FORMATS:
        raise NotShareable(f"block sizes differ, and {exporter.content_format} cannot be cut between tokens")
    if exporter.total_kv_heads != importer.total_kv_heads:
        raise NotShareable(f"the models have {exporter.total_kv_heads} and {importer.total_kv_heads} KV heads")
    for form in (exporter, importer):  # before anything is made as often as they say
        sizes = [size for count, layer in form.layers for size in (count, *vars(layer).values())]
        if not all(0 < size < _LARGEST for size in sizes):
            raise NotShareable("a number of layers, a stride or a size is not positive, or absurd")
    if exporter.num_layers != importer.num_layers:
        raise NotShareable(f"the caches have {exporter.num_layers} and {importer.num_layers} layers")


@dataclass(frozen=True)
class _Cut:
    """One side: its cache, the heads it has, those to share, and the tokens of a unit.

    `in_planes`: keys and values must be told apart. Whole blocks are moved without.
    """

    form: CacheForm
    held: HeadRange
    heads: HeadRange
    tokens: int
    in_planes: bool

    def parts(self, layer: LayerForm) -> Iterator[_Part]:
        num_tokens = self.form.block_size
        heads = _Axis("head", self.heads.count, layer.head_stride)
        start = (self.heads.first - self.held.first) * layer.head_stride
        if self.in_planes:
            element, value = layer.element, layer.content // 2  # bytes of a number, and of a token's value
            if layer.token_stride != layer.content or layer.content % (2 * element):
                raise NotShareable("the keys and values of a head do not lie in one piece, as CPU attention has them")
            width = _Axis("content", value // element, num_tokens * element)
            columns, rows = _Axis("token", self.tokens, element), _Axis("token", self.tokens, value)
            yield _Part(start, (heads, width, columns), element, self.tokens * element)
            yield _Part(start + num_tokens * value, (heads, rows), value, self.tokens * value)
            return
        axes = sorted((heads, _Axis("token", self.tokens, layer.token_stride)), key=lambda axis: -axis.stride)
        yield _Part(start, tuple(axes), layer.content, self.tokens * layer.token_stride)

    @property
    def units_per_block(self) -> int:
        return self.form.block_size // self.tokens


def _share_layer(
    exporter: _Cut, exporter_layer: LayerForm, importer: _Cut, importer_layer: LayerForm
) -> tuple[list[Runs], list[Runs]]:
    runs: tuple[list[Runs], list[Runs]] = ([], [])
    if not exporter.heads.count:
        return runs
    forms, cuts = (exporter_layer, importer_layer), (exporter, importer)
    for parts in zip(exporter.parts(exporter_layer), importer.parts(importer_layer), strict=True):
        axes = [[axis for axis in part.axes if axis.count > 1] for part in parts]
        if parts[0].item != parts[1].item or [(a.name, a.count) for a in axes[0]] != [
            (a.name, a.count) for a in axes[1]
        ]:
            raise NotShareable("heads, tokens and contents lie in another order, or contents are of another size")
        run_bytes = parts[0].item
        while axes[0] and all(side[-1].stride == run_bytes for side in axes):
            run_bytes *= axes[0][-1].count
            for side in axes:
                side.pop()
        # What lies outside the block axis is cut into runs of its own, so that consecutive blocks can be one piece.
        is_outside = [any(side[i].stride > form.block_stride for side, form in zip(axes, forms, strict=True))
                      for i in range(len(axes[0]))]  # fmt: skip
        if math.prod(axis.count for axis in axes[0]) > MAX_RUNS_PER_UNIT:
            raise NotShareable(f"a unit of {exporter.tokens} tokens lies in more than {MAX_RUNS_PER_UNIT} pieces")
        for side, part, form, cut, found in zip(axes, parts, forms, cuts, runs, strict=True):
            outer = [axis for axis, outside in zip(side, is_outside, strict=True) if outside]
            inner = tuple(_offsets([axis for axis, outside in zip(side, is_outside, strict=True) if not outside]))
            found.extend(
                Runs(part.offset + offset, form.block_stride, part.unit_stride, cut.units_per_block, inner, run_bytes)
                for offset in _offsets(outer)
            )
    return runs


def _offsets(axes: Sequence[_Axis]) -> list[int]:
    steps = [range(0, axis.stride * axis.count, axis.stride) for axis in axes]
    return [sum(step) for step in itertools.product(*steps)]
