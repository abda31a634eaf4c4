import numpy as np
import pytest

from lab.links.arms.block_cache import BlockCache
from lab.links.messages import Transfer
from lab.links.shapes import REAL_SHAPES, BlockShape, MemoryOrder

KIB = 1024


@pytest.mark.parametrize(
    ("model", "token_kib", "piece_kib", "block_mib"),
    [("SmolLM2-135M", 22.5, 96, 2.8125), ("Llama-3.1-8B", 128, 64, 2), ("Llama-3.1-70B", 320, 64, 5)],
)
def test_real_models_have_their_known_sizes(model: str, token_kib: float, piece_kib: float, block_mib: float) -> None:
    (shape,) = [shape for shape in REAL_SHAPES if shape.model == model]
    assert shape.token_bytes == token_kib * KIB
    assert shape.piece_bytes == piece_kib * KIB
    assert shape.block_bytes == block_mib * KIB * KIB


def test_a_cache_keeps_to_its_bytes_and_can_be_shared_out() -> None:
    shape = REAL_SHAPES[2]
    assert shape.num_blocks(128 << 20, 8) == 24
    assert shape.num_blocks(1, 8) == 8, "fewer could not be shared out"


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_a_cache_is_registered_as_vllm_does_it(order: MemoryOrder) -> None:
    shape = BlockShape("tiny", num_layers=2, num_kv_heads=3, head_size=8, block_size=4, order=order)
    cache = BlockCache(shape, num_blocks=5)
    registered = cache.as_registered()
    assert registered.layout.layer_bytes == (shape.piece_bytes,) * 2
    assert registered.layout.form is not None
    assert registered.layout.form.memory_orders == {
        "head, token, content" if order == "LBHNC" else "token, head, content"
    }
    assert [layer[0].base_address for layer in registered.layers] == cache.layer_addresses
    assert all(len(layer) == 1 for layer in registered.layers), "a block of a layer is one piece"


def test_a_cache_tells_which_block_is_wrong() -> None:
    shape = BlockShape("tiny", num_layers=2, num_kv_heads=1, head_size=8, block_size=4, order="LBNHC")
    ours, theirs = BlockCache(shape, 4), BlockCache(shape, 4)
    theirs.fill()
    ours.wipe()
    transfer = Transfer("t", [0, 1, 3], [2, 0, 1])
    for ours_layer, theirs_layer in zip(ours.layers, theirs.layers, strict=True):
        ours_layer[transfer.target_ids] = theirs_layer[transfer.source_ids]
    assert ours.first_difference([transfer]) == ""
    ours.layers[1][0, -1] ^= np.uint8(1)
    assert "layer 1 of block 0" in ours.first_difference([transfer])
    assert ours.first_difference([Transfer("t", [1], [2])]), "no two blocks are equal"
