"""Tests that need a GPU. Elsewhere each is skipped, and says why."""

import importlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.gpu.device import CudaDevice, CudaUnusable, open_device


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    try:
        return open_device("cuda:0")
    except CudaUnusable as error:
        pytest.skip(f"needs a GPU: {error}")


@pytest.fixture(scope="session")
def cupy(device: CudaDevice) -> Any:
    device.use()
    return importlib.import_module("cupy")


@pytest.fixture(scope="session")
def num_gpus(cupy: Any) -> int:
    return int(cupy.cuda.runtime.getDeviceCount())


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for the path of an ipc socket, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="kv"))
    yield path
    shutil.rmtree(path)
