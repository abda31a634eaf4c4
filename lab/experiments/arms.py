"""From an arm to the servers that have to be started for it."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.launch.worker_plan import CPU_CHUNK_TOKENS
from cluster.preflight.machine import Machine
from lab.experiments.experiment import Arm, ContinuousArm, DisaggregatedArm, Experiment, ExperimentError, TeachingArm
from lab.experiments.results import Setup
from lab.launches import bare_vllm, twinpool
from lab.load.work import WorkClass
from lab.server_process import Launch, free_port

SERVED_NAME = "lab"
CLASS_HEADER = "X-Slo-Class"
"""Tells a cluster what kind of request it is."""
_VLLM_CHUNK_TOKENS = 2048
"""What vLLM's API server takes on small devices unless it is told otherwise."""
_CPU_REMOTE_TOKENS, _GPU_REMOTE_TOKENS = 64, 2048
"""The cluster's own break-even, `scheduling.remote_prefill_min_tokens: auto`."""
_KV_GIB_OF_ALL = 4
"""KV memory on CPUs, shared by the servers of an arm."""


def launches(experiment: Experiment, arm: Arm, model: str, machine: Machine, directory: Path) -> list[Launch]:
    """The servers of an arm. Raises `ExperimentError` when the machine is too small for them."""
    match arm:
        case TeachingArm():
            return [_teaching(arm, model)]
        case ContinuousArm():
            return _continuous(arm, model, experiment.engine, machine)
        case DisaggregatedArm():
            config = {
                "model": model,
                "served_model_name": SERVED_NAME,
                **arm.config,
                "engine": {**experiment.engine, **arm.config.get("engine", {})},
            }
            config["slo"] = _slo(experiment.classes(arm, 1.0), arm.config.get("slo", {}))
            config["server"] = {**arm.config.get("server", {}), "port": free_port()}
            return [twinpool(_slug(arm.name), config, directory)]


def setup(experiment: Experiment, arm: Arm, machine: Machine) -> Setup | None:
    """How requests flow through an arm's servers; None for teaching ways."""
    on_cpu = not machine.gpus
    match arm:
        case TeachingArm():
            return None
        case ContinuousArm():
            chunk = {**experiment.engine, **arm.engine}.get("max_num_batched_tokens", _VLLM_CHUNK_TOKENS)
            return Setup(int(chunk), replicas=arm.replicas)
        case DisaggregatedArm():
            pools: Mapping[str, Any] = arm.config.get("pools", {})
            prefill, decode = pools.get("prefill", {}), pools.get("decode", {})
            engine = {**experiment.engine, **arm.config.get("engine", {}), **prefill.get("engine", {})}
            default = CPU_CHUNK_TOKENS if on_cpu else _VLLM_CHUNK_TOKENS
            least = arm.config.get("scheduling", {}).get("remote_prefill_min_tokens", "auto")
            if least == "auto":
                least = _CPU_REMOTE_TOKENS if on_cpu else _GPU_REMOTE_TOKENS
            return Setup(
                int(engine.get("max_num_batched_tokens", default)),
                num_prefill=int(prefill.get("replicas", 1)),
                num_decode=int(decode.get("replicas", 1)),
                remote_min_tokens=int(least),
            )


def _slo(classes: Sequence[WorkClass], configured: Mapping[str, Any]) -> dict[str, Any]:
    """A class of requests per kind of work, with its limits, beside what the arm itself configures."""
    named = {
        work.name: {key: value for key, value in (("ttft_s", work.ttft_s), ("itl_s", work.itl_s)) if value is not None}
        for work in classes
    }
    given: Mapping[str, Any] = configured.get("classes", {})
    return {
        **configured,
        "classes": {name: {**named.get(name, {}), **given.get(name, {})} for name in {**named, **given}},
    }


def _continuous(arm: ContinuousArm, model: str, engine: Mapping[str, Any], machine: Machine) -> list[Launch]:
    devices = list(machine.gpus) if machine.gpus else [str(core) for core in machine.cores]
    share = len(devices) // arm.replicas
    if not share:
        what = "GPUs" if machine.gpus else "cores"
        raise ExperimentError(f"arm {arm.name}: {arm.replicas} replicas do not share {len(devices)} {what}")
    flags = {**engine, **arm.engine}
    servers = []
    for index in range(arm.replicas):
        mine = ",".join(devices[index * share : (index + 1) * share])
        name, kv_gib = f"{_slug(arm.name)}-{index}", _KV_GIB_OF_ALL // arm.replicas or 1
        launch = bare_vllm(name, model, SERVED_NAME, free_port(), flags, mine, kv_gib)
        if machine.gpus:
            env = {name: value for name, value in launch.env.items() if not name.startswith("VLLM_CPU")}
            launch = Launch(launch.name, launch.command, launch.port, {**env, "CUDA_VISIBLE_DEVICES": mine})
        servers.append(launch)
    return servers


def _teaching(arm: TeachingArm, model: str) -> Launch:
    port = free_port()
    command = [sys.executable, "-m", "lab.experiments.teaching.server", arm.kind, model, str(port)]
    return Launch(_slug(arm.name), command, port, {"HF_HUB_OFFLINE": "1"})


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
