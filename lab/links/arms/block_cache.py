"""A cache of one shape, in CPU or GPU memory, with contents that another process can compute and check."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import CacheMap, ModelFacts, probe
from lab.links.messages import Transfer
from lab.links.shapes import BlockShape

_SEED = 17
_STEP_BYTES = 64
"""Between the contents of one piece and the next in the random pattern: no two are equal."""


class BlockCache:
    def __init__(self, shape: BlockShape, num_blocks: int, arrays: ModuleType = np) -> None:
        """`arrays`: numpy, or cupy with the GPU selected. The contents are undefined."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.layers: list[Any] = [
            arrays.empty((num_blocks, shape.piece_bytes), dtype=np.uint8) for _ in range(shape.num_layers)
        ]  # [block, byte]
        self.layer_addresses = [_address(layer) for layer in self.layers]
        self._arrays = arrays
        num_pieces = shape.num_layers * num_blocks
        generator = np.random.default_rng(_SEED)
        pattern_bytes = shape.piece_bytes + _STEP_BYTES * num_pieces
        self._pattern: NDArray[np.uint8] = generator.integers(0, 256, pattern_bytes, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.shape.block_bytes

    @property
    def layer_bytes(self) -> int:
        """One layer of all blocks."""
        return self.num_blocks * self.shape.piece_bytes

    def fill(self) -> None:
        """With what `first_difference` expects."""
        for layer, array in enumerate(self.layers):
            for block in range(self.num_blocks):
                array[block] = self._arrays.asarray(self._contents(layer, block))
        self._synchronize()

    def wipe(self) -> None:
        for array in self.layers:
            array[...] = 0
        self._synchronize()

    def first_difference(self, transfers: Sequence[Transfer]) -> str:
        """Where the target blocks are not what the source blocks of a filled cache are; empty when they are."""
        for transfer in transfers:
            for source, target in zip(transfer.source_ids, transfer.target_ids, strict=True):
                for layer, array in enumerate(self.layers):
                    piece = array[target] if self._arrays is np else self._arrays.asnumpy(array[target])
                    if not np.array_equal(piece, self._contents(layer, source)):
                        return f"layer {layer} of block {target} does not hold what block {source} of the exporter has"
        return ""

    def piece_addresses(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """[layer, block]"""
        return piece_addresses(self.layer_addresses, self.shape, block_ids)

    def as_registered(self) -> CacheMap:
        """As vLLM registers it: per layer [block, kv head, token, content], in the order of the shape in memory."""
        shape = self.shape
        content = shape.head_size * 2
        caches: Mapping[str, Any] = {
            f"layers.{layer}.attention": self._logical(array, content) for layer, array in enumerate(self.layers)
        }
        facts = ModelFacts(
            model=shape.model,
            dtype="bfloat16",
            kv_dtype="bfloat16",
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            block_size=shape.block_size,
            layout_name=shape.order,
            attention_backend="lab",
            tp_size=1,
            total_kv_heads=shape.num_kv_heads,
        )
        return probe(caches, self.num_blocks, facts)

    def _logical(self, array: Any, content: int) -> Any:
        shape = self.shape
        elements = array.view(np.uint16)
        if shape.order == "LBHNC":
            return elements.reshape(self.num_blocks, shape.num_kv_heads, shape.block_size, content)
        tokens_first = elements.reshape(self.num_blocks, shape.block_size, shape.num_kv_heads, content)
        return tokens_first.transpose(0, 2, 1, 3)

    def _contents(self, layer: int, block: int) -> NDArray[np.uint8]:
        first = _STEP_BYTES * (layer * self.num_blocks + block)
        return self._pattern[first : first + self.shape.piece_bytes]

    def _synchronize(self) -> None:
        if self._arrays is not np:
            self._arrays.cuda.runtime.deviceSynchronize()


def piece_addresses(layer_addresses: Sequence[int], shape: BlockShape, block_ids: Sequence[int]) -> NDArray[np.uint64]:
    """[layer, block], of a cache in any process."""
    bases = np.array(layer_addresses, dtype=np.uint64)
    return bases[:, None] + np.array(block_ids, dtype=np.uint64)[None, :] * np.uint64(shape.piece_bytes)


def _address(array: Any) -> int:
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return int(interface["data"][0])
