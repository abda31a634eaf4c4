"""What one rank's paged KV cache looks like, and where its blocks lie in memory.

`probe` reads shapes and strides of the registered caches, assumes nothing else about them, and refuses what it
cannot describe. A *run* is a contiguous piece of one block of one layer; a *region* is one such run over all blocks.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvtransfer.resharding.forms import CUTTABLE_FORMATS, CacheForm, LayerForm
from kvtransfer.resharding.shares import Runs

MAX_RUNS_PER_BLOCK = 1024
"""More pieces than this per layer and block would cost more in bookkeeping than in bytes."""


class LayoutError(ValueError):
    """A cache whose blocks cannot be described as a few contiguous runs."""


@dataclass(frozen=True)
class Region:
    """Equal runs of one layer, at the same places in every block.

    Usually one run per block, of `run_bytes` at `base_address + b * block_stride_bytes`. Where blocks are cut to match
    those of another rank, `b` counts units, of which a block has several, and a unit may have several runs.
    """

    base_address: int
    block_stride_bytes: int
    run_bytes: int
    num_blocks: int
    run_offsets: tuple[int, ...] = (0,)
    units_per_block: int = 1
    unit_stride_bytes: int = 0

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte of the first block, and the byte after the last one of the last."""
        last = self.base_address + (self.num_blocks - 1) * self.block_stride_bytes
        last += (self.units_per_block - 1) * self.unit_stride_bytes + max(self.run_offsets)
        return self.base_address + min(self.run_offsets), last + self.run_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, or unit, in this region."""
        return self.run_bytes * len(self.run_offsets)

    def addresses(self, block_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Of every run of these blocks, or units: [block, run]."""
        blocks = block_ids // np.uint64(self.units_per_block)
        units = block_ids % np.uint64(self.units_per_block)
        starts = blocks * np.uint64(self.block_stride_bytes) + units * np.uint64(self.unit_stride_bytes)
        return starts[:, None] + self._run_addresses[None, :]

    @cached_property
    def _run_addresses(self) -> NDArray[np.uint64]:
        return np.array(self.run_offsets, dtype=np.uint64) + np.uint64(self.base_address)


@dataclass(frozen=True)
class ModelFacts:
    """What shapes and strides cannot tell."""

    model: str
    dtype: str
    kv_dtype: str
    num_kv_heads: int
    """Of this rank."""
    head_size: int
    block_size: int
    """Tokens per block."""
    layout_name: str
    attention_backend: str
    tp_size: int
    total_kv_heads: int = 0
    """Of the model; 0 when it is not known how heads are shared out to ranks. MLA has one head, on every rank."""
    content_format: str = ""
    """How the content of a head's tokens lies in a block, see `resharding.forms`."""


@dataclass(frozen=True)
class CacheLayout:
    """Everything that decides who can exchange blocks with whom; independent of ranks and pool sizes."""

    facts: ModelFacts
    layer_names: tuple[str, ...]
    block_shapes: tuple[tuple[int, ...], ...]
    """Per layer: the logical axes of one block, for example (kv head, token, content)."""
    axis_orders: tuple[tuple[int, ...], ...]
    """Per layer: those axes as they lie in memory, outermost first."""
    block_runs: tuple[tuple[int, ...], ...]
    """Per layer: bytes of each contiguous run of one block, in logical order."""
    form: CacheForm | None = None
    """None when the cache cannot be cut by heads: then it goes only to one with an equal layout, rank by rank."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_names)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.facts.block_size

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Per layer: bytes of one block."""
        return tuple(sum(runs) for runs in self.block_runs)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_bytes)

    def fields(self) -> dict[str, str]:
        """The layout as name and text, so that a refusal can name what differs."""
        facts = {name: str(value) for name, value in vars(self.facts).items()}
        return facts | {
            "num_layers": str(self.num_layers),
            "layer_names": hashlib.sha256("\n".join(self.layer_names).encode()).hexdigest()[:12],
            "block_shapes": _counted(self.block_shapes),
            "axis_orders": _counted(self.axis_orders),
            "block_runs": _counted(self.block_runs),
            **self._form_fields(),
        }

    def _form_fields(self) -> dict[str, str]:
        if self.form is None:
            return {"memory_order": ""}
        (memory_order,) = self.form.memory_orders
        return {
            "memory_order": memory_order,
            "content_bytes": _counted(tuple((layer.content, layer.element) for layer in self.form.each_layer())),
            "cuttable_blocks": "yes" if self.form.content_format in CUTTABLE_FORMATS else "no",
        }

    def fingerprint(self) -> str:
        text = "\n".join(f"{name}={value}" for name, value in sorted(self.fields().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CacheMap:
    """A layout at its addresses in this process."""

    layout: CacheLayout
    num_blocks: int
    layers: tuple[tuple[Region, ...], ...]
    """Per layer, one region per run."""
    owners: tuple[object, ...]
    """The caches themselves: they must outlive every copy."""
    device: str = "cpu"
    """`cpu`, or `cuda:N` as torch names GPUs."""
    layer_addresses: tuple[int, ...] = ()
    """Per layer, where its block 0 starts."""

    @classmethod
    def of(cls, layout: CacheLayout, num_blocks: int, layers: tuple[tuple[Region, ...], ...]) -> Self:
        """A map of memory that somebody else keeps alive."""
        return cls(layout, num_blocks, layers, ())

    def cut(self, layers: Sequence[Sequence[Runs]]) -> tuple[tuple[Region, ...], ...]:
        """Per layer the regions of what is shared with another rank."""
        return tuple(
            tuple(region_of(runs, address + runs.offset, self.num_blocks) for runs in layer)
            for address, layer in zip(self.layer_addresses, layers, strict=True)
        )


def region_of(runs: Runs, base_address: int, num_blocks: int) -> Region:
    """These runs where they lie; `base_address` is that of the first one's offset."""
    return Region(
        base_address,
        runs.block_stride,
        runs.run_bytes,
        num_blocks,
        runs.run_offsets,
        runs.units_per_block,
        runs.unit_stride,
    )


@dataclass(frozen=True)
class _Strided:
    """An array as address, shape (elements), strides (bytes)."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    device: str


def probe(kv_caches: Mapping[str, Any], num_blocks: int, facts: ModelFacts) -> CacheMap:
    """Describe `kv_caches`: per layer name a torch tensor, numpy or cupy array with the block as logical axis 0.

    Raises LayoutError, naming the layer with its shape and strides, for anything that is not a set of contiguous runs.
    """
    if not kv_caches:
        raise LayoutError("No KV cache was registered: kvtransfer needs at least one attention layer.")
    names = tuple(sorted(kv_caches, key=_natural_order))
    shapes, orders, runs, layers, arrays = [], [], [], [], []
    devices = {}
    for name in names:
        array = _strided(name, kv_caches[name])
        devices[array.device] = name
        where = f"KV cache of layer {name!r} (shape {array.shape}, strides {array.strides} bytes)"
        if len(array.shape) < 2 or array.shape[0] != num_blocks:
            raise LayoutError(
                f"{where}: axis 0 should be the block and have {num_blocks} entries. "
                "Use an attention backend whose cache has one entry per KV block."
            )
        order = _memory_order(where, array)
        run_bytes, offsets = _runs(where, array, order)
        layers.append(
            tuple(Region(array.address + offset, array.strides[0], run_bytes, num_blocks) for offset in offsets)
        )
        shapes.append(array.shape[1:])
        orders.append(tuple(axis - 1 for axis in order if axis != 0))
        runs.append((run_bytes,) * len(offsets))
        arrays.append(array)
    layout = CacheLayout(facts, names, tuple(shapes), tuple(orders), tuple(runs), _form(arrays, facts))
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise LayoutError(f"The KV caches lie on several devices: {places}. A rank moves blocks of one device.")
    owners = tuple(kv_caches[name] for name in names)
    addresses = tuple(array.address for array in arrays)
    return CacheMap(layout, num_blocks, tuple(layers), owners, next(iter(devices)), addresses)


def _form(arrays: list[_Strided], facts: ModelFacts) -> CacheForm | None:
    """None unless every layer is [block, head, token, content] with the heads that this model has."""
    layers = []
    for array in arrays:
        if len(array.shape) != 4 or array.shape[1:3] != (facts.num_kv_heads, facts.block_size):
            return None
        block_stride, head_stride, token_stride, element_stride = array.strides
        if element_stride != array.item_bytes and array.shape[3] > 1:
            return None
        content = array.shape[3] * array.item_bytes
        layers.append(LayerForm(block_stride, head_stride, token_stride, content, array.item_bytes))
    if facts.total_kv_heads < 1 or facts.num_kv_heads != max(1, facts.total_kv_heads // facts.tp_size):
        return None
    groups = tuple((len(list(group)), layer) for layer, group in itertools.groupby(layers))
    form = CacheForm(
        facts.tp_size, facts.total_kv_heads, facts.num_kv_heads, facts.block_size, facts.content_format, groups
    )
    return form if len(form.memory_orders) == 1 else None


def _strided(name: str, cache: Any) -> _Strided:
    if hasattr(cache, "data_ptr"):  # a torch tensor; torch itself is not imported for this
        if cache.device.type not in ("cpu", "cuda"):
            raise LayoutError(
                f"KV cache of layer {name!r} is on {cache.device}: only CPU and CUDA memory can be moved."
            )
        item_bytes = int(cache.element_size())
        strides = tuple(int(stride) * item_bytes for stride in cache.stride())
        return _Strided(int(cache.data_ptr()), tuple(cache.shape), strides, item_bytes, _torch_device(cache.device))
    if hasattr(cache, "__array_interface__"):
        address = int(cache.__array_interface__["data"][0])
        return _Strided(address, tuple(cache.shape), tuple(cache.strides), int(cache.itemsize), "cpu")
    if hasattr(cache, "__cuda_array_interface__"):
        address = int(cache.__cuda_array_interface__["data"][0])
        device = f"cuda:{cache.device.id}"
        return _Strided(address, tuple(cache.shape), tuple(cache.strides), int(cache.itemsize), device)
    raise LayoutError(
        f"KV cache of layer {name!r} is a {type(cache).__name__}: expected one tensor per layer. "
        "State-space and hybrid caches cannot be handed over yet."
    )


def _torch_device(device: Any) -> str:
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"


def _memory_order(where: str, array: _Strided) -> tuple[int, ...]:
    """Axes that have more than one entry, outermost first, refusing arrays whose elements overlap."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    axes.sort(key=lambda axis: array.strides[axis], reverse=True)
    extent = array.item_bytes
    for axis in reversed(axes):
        if array.strides[axis] < extent:
            raise LayoutError(f"{where}: axis {axis} overlaps another. Register the cache unexpanded.")
        extent = array.strides[axis] * array.shape[axis]
    return tuple(axes)


def _runs(where: str, array: _Strided, order: tuple[int, ...]) -> tuple[int, list[int]]:
    """Bytes of each contiguous run of one block, and the offsets of the runs in logical order."""
    run_bytes = array.item_bytes
    outer = [axis for axis in order if axis != 0]
    while outer and array.strides[outer[-1]] == run_bytes:
        run_bytes *= array.shape[outer.pop()]
    if run_bytes == array.item_bytes and outer:
        raise LayoutError(f"{where}: no inner axis is contiguous, a block would have to move element by element.")
    num_runs = math.prod(array.shape[axis] for axis in outer)
    if num_runs > MAX_RUNS_PER_BLOCK:
        raise LayoutError(f"{where}: a block lies in {num_runs} pieces; at most {MAX_RUNS_PER_BLOCK} can be moved.")
    steps = [range(0, array.strides[axis] * array.shape[axis], array.strides[axis]) for axis in sorted(outer)]
    return run_bytes, [sum(step) for step in itertools.product(*steps)]


def _natural_order(name: str) -> list[tuple[int, str]]:
    """`layers.10` after `layers.9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _counted(per_layer: tuple[tuple[int, ...], ...]) -> str:
    """Equal neighbours together: `30 x (3, 128, 128)`."""
    return ", ".join(f"{len(list(group))} x {_short(value)}" for value, group in itertools.groupby(per_layer))


def _short(value: tuple[int, ...]) -> str:
    if len(value) > 4 and len(set(value)) == 1:
        return f"({len(value)} times {value[0]})"
    return str(value)
