import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import CacheMap, LayoutError, ModelFacts, probe

FACTS = ModelFacts("model", "bfloat16", "auto", 3, 64, 16, "nhd", "cpu", 1)


def bytes_of_block(caches: CacheMap, layer: int, block: int) -> bytes:
    """Read through addresses alone, as the links do."""
    return b"".join(
        ctypes.string_at(region.base_address + block * region.block_stride_bytes, region.run_bytes)
        for region in caches.layers[layer]
    )


@given(st.permutations(range(4)), st.lists(st.integers(2, 4), min_size=3, max_size=3), st.integers(2, 5))
def test_runs_cover_exactly_the_bytes_of_each_block(order: list[int], inner: list[int], num_blocks: int) -> None:
    shape = [num_blocks, *inner]
    in_memory = np.arange(np.prod(shape), dtype=np.uint16).reshape([shape[axis] for axis in order])
    cache = in_memory.transpose(np.argsort(order))
    if order[-1] == 0:  # the block is the innermost axis: nothing of a block is contiguous
        with pytest.raises(LayoutError, match="element by element"):
            probe({"layer": cache}, num_blocks, FACTS)
        return
    caches = probe({"layer": cache}, num_blocks, FACTS)
    for block in range(num_blocks):
        found = np.frombuffer(bytes_of_block(caches, 0, block), dtype=np.uint16)
        assert sorted(found) == sorted(cache[block].ravel())


def test_a_contiguous_block_is_one_run() -> None:
    caches = probe({"layer": np.zeros((8, 3, 128, 128), dtype=np.uint16)}, 8, FACTS)
    assert caches.layout.block_runs == ((3 * 128 * 128 * 2,),)
    assert caches.layout.block_bytes == 98304


def test_keys_and_values_in_separate_halves_are_two_runs_in_logical_order() -> None:
    halves = np.arange(2 * 8 * 6, dtype=np.uint16).reshape(2, 8, 6)
    caches = probe({"layer": halves.transpose(1, 0, 2)}, 8, FACTS)
    assert caches.layout.block_runs == ((12, 12),)
    assert bytes_of_block(caches, 0, 5) == halves[0, 5].tobytes() + halves[1, 5].tobytes()


def test_torch_tensors_are_described_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 8, 4, 6, dtype=torch.bfloat16).transpose(0, 1)
    array = np.zeros((2, 8, 4, 6), dtype=np.uint16).transpose(1, 0, 2, 3)
    of_tensor, of_array = probe({"layer": tensor}, 8, FACTS), probe({"layer": array}, 8, FACTS)
    assert of_tensor.layout == of_array.layout
    assert of_tensor.layers[0][0].base_address == tensor.data_ptr()


def test_layers_are_in_natural_order_whatever_the_order_of_registration() -> None:
    caches = probe({f"layers.{i}": np.zeros((4, 8)) for i in (10, 9, 0)}, 4, FACTS)
    assert caches.layout.layer_names == ("layers.0", "layers.9", "layers.10")


def test_the_fingerprint_does_not_depend_on_the_size_of_the_pool() -> None:
    small, large = (probe({"layer": np.zeros((2, n, 8)).swapaxes(0, 1)}, n, FACTS) for n in (4, 400))
    assert small.layout.fingerprint() == large.layout.fingerprint()


@pytest.mark.parametrize("change", [{"model": "other"}, {"kv_dtype": "fp8"}, {"block_size": 32}, {"tp_size": 2}])
def test_the_fingerprint_depends_on_every_fact_and_the_fields_name_it(change: dict[str, str | int]) -> None:
    cache = {"layer": np.zeros((4, 8))}
    ours, theirs = probe(cache, 4, FACTS).layout, probe(cache, 4, replace(FACTS, **change)).layout  # type: ignore[arg-type]
    assert ours.fingerprint() != theirs.fingerprint()
    differing = {name for name, value in ours.fields().items() if theirs.fields()[name] != value}
    assert differing == set(change)


def test_the_fingerprint_depends_on_the_order_of_axes_in_memory() -> None:
    tokens_inside = probe({"layer": np.zeros((4, 3, 5, 8))}, 4, FACTS).layout
    heads_inside = probe({"layer": np.zeros((4, 5, 3, 8)).swapaxes(1, 2)}, 4, FACTS).layout
    assert tokens_inside.block_runs == heads_inside.block_runs
    assert tokens_inside.fingerprint() != heads_inside.fingerprint()


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        (np.zeros((5, 8)), "axis 0 should be the block"),
        (np.zeros(4), "axis 0 should be the block"),
        (np.broadcast_to(np.zeros((1, 8)), (4, 8)), "overlaps"),
        (np.zeros((4, 8))[:, ::2], "element by element"),
        (np.zeros((4, 8))[::-1], "overlaps"),
        (np.zeros((4, 2048, 4), dtype=np.uint16)[:, :, :2], "2048 pieces"),
        ([np.zeros((4, 8))], "expected one tensor per layer"),
    ],
    ids=["wrong axis", "no axis", "expanded", "strided", "reversed", "too many runs", "state space"],
)
def test_a_cache_that_cannot_be_described_is_refused_by_name(cache: object, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint) as refused:
        probe({"layers.7.attention": cache}, 4, FACTS)
    assert "layers.7.attention" in str(refused.value)


def test_a_model_without_caches_is_refused() -> None:
    with pytest.raises(LayoutError, match="No KV cache"):
        probe({}, 4, FACTS)
