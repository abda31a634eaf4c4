"""How much memory GPUs have, as NVIDIA's driver says.

Asked of `nvidia-smi`, so that this process never initialises CUDA: its children could not use the GPUs after a fork,
and a context takes memory on each.
"""

import logging
import subprocess
from collections.abc import Mapping, Sequence

logger = logging.getLogger("twinpool.preflight")

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_DEADLINE_S = 20.0  # without persistence mode the driver wakes up every GPU first


def gpu_memory(gpus: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Bytes by device id (an index or a UUID, as in CUDA_VISIBLE_DEVICES); what cannot be told is left out."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_DEADLINE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("the memory of GPUs is not known: %s", error)
        return {}
    return read_answer(answer, gpus, environ)


def read_answer(answer: str, gpus: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """From lines like `0, GPU-5f0c1c8d-..., 81559` (MiB)."""
    by_index: dict[str, int] = {}
    by_uuid: dict[str, int] = {}
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[2].isdigit():
            by_index[fields[0]] = by_uuid[fields[1]] = int(fields[2]) << 20
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and by_index:
        # CUDA counts the fastest first, nvidia-smi goes by the bus: of unequal GPUs the largest is meant.
        by_index = dict.fromkeys(by_index, max(by_index.values()))
    found = {gpu: by_index.get(gpu) or _by_prefix(by_uuid, gpu) for gpu in gpus}
    return {gpu: size for gpu, size in found.items() if size}


def _by_prefix(by_uuid: Mapping[str, int], gpu: str) -> int | None:
    """CUDA takes the beginning of a UUID for the whole. A part of a GPU (`MIG-...`) is none of those listed."""
    matching = {size for uuid, size in by_uuid.items() if gpu.startswith("GPU-") and uuid.startswith(gpu)}
    return matching.pop() if len(matching) == 1 else None
