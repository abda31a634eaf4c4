import subprocess
from typing import Any

import pytest

from cluster.preflight import gpu_memory
from cluster.preflight.gpu_memory import read_answer

TWO = "0, GPU-5f0c1c8d-aa, 81559\n1, GPU-77aa0000-bb, 81559\n"
UNEQUAL = "0, GPU-5f0c1c8d-aa, 24576\n1, GPU-77aa0000-bb, 81559\n"
MIB = 1 << 20


def test_indices_and_beginnings_of_uuids_are_understood() -> None:
    assert read_answer(TWO, ("1", "GPU-5f0c1c8d"), {}) == {"1": 81559 * MIB, "GPU-5f0c1c8d": 81559 * MIB}


def test_parts_of_gpus_and_unknown_ones_are_left_out() -> None:
    assert read_answer(TWO, ("MIG-5f0c1c8d", "7", "GPU-other"), {}) == {}
    assert read_answer("No devices were found\n0, GPU-a, [N/A]\n", ("0",), {}) == {}


def test_of_unequal_gpus_the_largest_is_meant_unless_the_order_is_known() -> None:
    assert read_answer(UNEQUAL, ("0",), {}) == {"0": 81559 * MIB}
    assert read_answer(UNEQUAL, ("0",), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == {"0": 24576 * MIB}
    assert read_answer(UNEQUAL, ("GPU-5f0c1c8d-aa",), {}) == {"GPU-5f0c1c8d-aa": 24576 * MIB}


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
        subprocess.CalledProcessError(9, ""),
    ],
)
def test_without_an_answer_nothing_is_known(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", fail)
    assert gpu_memory.gpu_memory(("0",), {}) == {}
