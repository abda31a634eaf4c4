"""`twinpool lab links`: plans for this machine, and what becomes of the results."""

import importlib.metadata
import os
import platform
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
from rich.console import Console

from kvtransfer.gpu.device import CudaUnusable, open_device
from lab.links.measure import Placement, Plan, Results, measure
from lab.links.plot import can_plot, save_plot
from lab.links.report import Machine, Report, Skipped
from lab.links.shapes import REAL_SHAPES
from lab.links.table import tables
from lab.output_file import why_unwritable

CPU_PLACEMENTS = (
    Placement(("memcpy", "readv", "tcp", "host", "zmq")),
    Placement(("nixl",), rests=True),  # its threads spin
    Placement(("mooncake",), rests=True),
)
GPU_ARMS = ("cudaMemcpy", "cuda_ipc", "nccl")

QUICK = Plan(
    shapes=REAL_SHAPES,
    placements=CPU_PLACEMENTS,
    cache_bytes=40 << 20,
    rounds=3,
    seconds=20.0,
    fairness_seconds=3.0,
    move_timeout_s=8.0,
    large_bytes=512 << 20,
    large_repeats=2,
)
FULL = replace(
    QUICK, cache_bytes=128 << 20, rounds=15, seconds=165.0, fairness_seconds=25.0, move_timeout_s=20.0, large_repeats=5
)
_PACKAGES = (
    "twinpool",
    "nixl",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "pyzmq",
    "cupy-cuda13x",
)
_PICTURES = (".png", ".svg", ".pdf")
_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130


def run_links(*, quick: bool, large_gib: float, json_file: Path | None, plot_file: Path | None) -> int:
    """Measures, prints and writes. Returns the exit status: 1 when something failed, 130 after Ctrl-C."""
    if complaint := _why_unwritable(json_file, plot_file):
        Console(stderr=True, highlight=False).print(f"twinpool: {complaint}", style="red", soft_wrap=True)
        return _EXIT_USAGE
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    errors = Console(stderr=True, highlight=False)
    started_s, load = time.monotonic(), os.getloadavg()[0]
    plan = replace(QUICK if quick else FULL, large_bytes=int(large_gib * (1 << 30)))
    gpu, skipped = gpu_placement()
    plan = replace(plan, placements=(*plan.placements, *gpu))
    try:
        results = measure(plan, lambda text: errors.print(text, style="dim"))
    except KeyboardInterrupt:
        errors.print("twinpool: interrupted; every process that was started has ended.", style="red")
        return _EXIT_INTERRUPTED
    results.skipped[:0] = skipped
    report = _report(plan, results, load, time.monotonic() - started_s)
    Console(highlight=False).print(tables(report))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if plot_file is not None:
        save_plot(report, plot_file)
    return _EXIT_FAILED if any(skip.is_failure for skip in report.skipped) else 0


def gpu_placement() -> tuple[list[Placement], list[Skipped]]:
    """Arms between GPUs, or on one, and those that this machine cannot run."""
    try:
        device = open_device("cuda:0")
        num_gpus = int(device.cupy.cuda.runtime.getDeviceCount())
    except (CudaUnusable, RuntimeError) as error:
        return [], [Skipped(arm, f"needs a GPU: {error}", is_failure=False) for arm in GPU_ARMS]
    if num_gpus > 1:
        return [Placement(GPU_ARMS, devices=(1, 0))], []
    arms = tuple(arm for arm in GPU_ARMS if arm != "nccl")
    reason = "needs two GPUs, found one: NCCL allows one rank per GPU"
    return [Placement(arms, devices=(0, 0))], [Skipped("nccl", reason, is_failure=False)]


def _report(plan: Plan, results: Results, load: float, seconds: float) -> Report:
    machine = Machine(psutil.cpu_count() or 1, _processor(), psutil.virtual_memory().total, load)
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Report(
        machine, versions, list(plan.shapes), results.series, results.skipped, results.fairness, round(seconds, 1)
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _interrupt(number: int, frame: object) -> NoReturn:
    """The command line lets Ctrl-C end the process on the spot; here, others have to end first."""
    raise KeyboardInterrupt


def _why_unwritable(json_file: Path | None, plot_file: Path | None) -> str:
    """Known before minutes have been spent on measuring; empty when all is well."""
    if complaint := why_unwritable("--json", json_file) or why_unwritable("--plot", plot_file):
        return f"{complaint}."
    if plot_file is not None and plot_file.suffix not in _PICTURES:
        return f"--plot {plot_file}: the name should end in one of {', '.join(_PICTURES)}."
    if plot_file is not None and not can_plot():
        return "--plot needs matplotlib, which is not installed. Install twinpool's extra `lab`."
    return ""
