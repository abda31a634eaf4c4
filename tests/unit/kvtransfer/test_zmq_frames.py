import numpy as np
import pytest

from kvtransfer.layout import Region
from kvtransfer.links import zmq_frames
from kvtransfer.links.zmq_frames import gather, scatter


def regions(*arrays: np.ndarray) -> list[Region]:
    return [Region(array.ctypes.data, array.strides[0], array.shape[1], array.shape[0]) for array in arrays]


@pytest.mark.parametrize("release_gil_from_bytes", [1, 1 << 20])
def test_what_is_gathered_is_scattered_elsewhere(release_gil_from_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_frames, "_RELEASE_GIL_FROM_BYTES", release_gil_from_bytes)
    sources = [np.random.default_rng(n).integers(0, 256, (10, 5 + n), dtype=np.uint8) for n in range(3)]
    targets = [np.zeros_like(source) for source in sources]
    payload = gather([4, 5, 1], regions(*sources), np.empty(1000, dtype=np.uint8))
    assert bytes(payload) == b"".join(source[[4, 5, 1]].tobytes() for source in sources)
    scatter(payload, [0, 9, 3], regions(*targets))
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(target[[0, 9, 3]], source[[4, 5, 1]])
        assert not target[[1, 2, 4, 5, 6, 7, 8]].any()


def test_a_payload_of_another_size_is_not_scattered() -> None:
    target = np.zeros((10, 5), dtype=np.uint8)
    with pytest.raises(ValueError, match="9 bytes for blocks of 10"):
        scatter(memoryview(b"\xff" * 9), [1, 2], regions(target))
    assert not target.any()


def test_a_payload_that_does_not_fit_the_buffer_is_not_gathered() -> None:
    source = np.zeros((10, 5), dtype=np.uint8)
    with pytest.raises(ValueError, match="10 bytes for a buffer of 9"):
        gather([1, 2], regions(source), np.empty(9, dtype=np.uint8))


def test_many_small_runs_of_each_block_are_moved_like_few() -> None:
    """As those of single heads: 32 runs per block of 8 bytes each, every second one of somebody else."""
    source = np.random.default_rng(0).integers(0, 256, (10, 512), dtype=np.uint8)
    target = np.zeros_like(source)
    offsets = tuple(range(0, 512, 16))
    cut = [Region(array.ctypes.data, 512, 8, 10, offsets) for array in (source, target)]
    payload = gather([4, 1], cut[:1], np.empty(1000, dtype=np.uint8))
    runs = source.reshape(10, 32, 2, 8)[:, :, 0]
    assert bytes(payload) == runs[[4, 1]].tobytes()
    scatter(payload, [9, 3], cut[1:])
    assert np.array_equal(target.reshape(10, 32, 2, 8)[[9, 3]][:, :, 0], runs[[4, 1]])
    assert not target.reshape(10, 32, 2, 8)[:, :, 1].any()
    assert not target[[0, 1, 2, 4, 5, 6, 7, 8]].any()
