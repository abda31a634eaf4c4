"""Checks of a configuration against the installed vLLM, the model and this machine, before any process starts."""

import errno
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config import (
    OWNED_ENGINE_OPTIONS,
    ROLES,
    SHARED_ENGINE_OPTIONS,
    UNTESTED_ENGINE_OPTIONS,
    ClusterConfig,
    PoolConfig,
    Role,
)
from cluster.launch.worker_plan import WorkerPlan, WorkerPlanner
from cluster.preflight.machine import Machine, nodes_of_a_cluster
from cluster.preflight.memory.fit_checks import fit_problems, path_of
from cluster.preflight.memory.worker_memory import CPU_BLOCK_SIZE, GPU_BLOCK_SIZE, is_count
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import ConfigError, Problem, did_you_mean
from cluster.preflight.security_checks import security_problems
from cluster.preflight.vllm_options import VllmOptions, installed_vllm_options
from cluster.ray_launch.checks import ray_problems
from cluster.simulated.launch import SimulatedPlanner, simulation_problems

_CPU_BLOCK_MULTIPLE = 32
_WHOLE_NUMBERS = ("max_model_len", "block_size", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs")
_NO_GROUP = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}


@dataclass(frozen=True)
class Planned:
    """What becomes of a configuration that can be started."""

    workers: list[WorkerPlan]
    """Those that the cluster starts with, prefill first."""
    planner: WorkerPlanner | SimulatedPlanner
    """Has given these their places, and plans those that come later."""


def check_config(config: ClusterConfig, machine: Machine, model: ModelFacts | None) -> Planned:
    """The plan of a configuration that can be started here; raises `ConfigError` with every problem found."""
    problems = [*vllm_option_problems(config, installed_vllm_options()), *port_problems(config)]
    problems += security_problems(config, machine.environ)
    if config.launch == "ray":
        machine = nodes_of_a_cluster(machine)
        problems += ray_problems(config)
    if config.simulation.enabled:
        problems += [*simulation_problems(config), *slo_problems(config)]
        if problems:
            raise ConfigError(problems)
        simulated = SimulatedPlanner(config)
        return Planned(simulated.first(), simulated)
    # With overrides, engines use another model than the directory describes.
    known = None if config.engine.get("hf_overrides") else model
    problems += [*number_problems(config), *parallel_problems(config, known), *slo_problems(config)]
    if problems:
        raise ConfigError(problems)
    planner = WorkerPlanner(config, machine, model)
    plans = planner.first()
    problems = [problem for plan in plans for problem in engine_problems(config, plan, machine, known)]
    problems += fit_problems(config, plans, machine, known)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return Planned(plans, planner)


def vllm_option_problems(config: ClusterConfig, options: VllmOptions) -> list[Problem]:
    """Options that vLLM does not have, that are given in the wrong place, that twinpool sets itself or cannot take."""
    problems = []
    for path, given in _engine_tables(config):
        for name, value in given.items():
            if name in OWNED_ENGINE_OPTIONS:
                problems.append(Problem(f"{path}.{name}", "twinpool decides this option", OWNED_ENGINE_OPTIONS[name]))
            elif name in UNTESTED_ENGINE_OPTIONS and value is not None and value != _NO_GROUP.get(name):
                problems.append(
                    Problem(f"{path}.{name}", UNTESTED_ENGINE_OPTIONS[name], "Remove it; see docs/operating.md, Limits")
                )
            elif path != "engine" and name in SHARED_ENGINE_OPTIONS:
                problems.append(
                    Problem(f"{path}.{name}", "both pools and the API server must agree on it", f"Set engine.{name}")
                )
            elif name not in options.engine:
                problems.append(
                    _unknown(
                        f"{path}.{name}", name, "engine option", options.engine, options.frontend, "server.options"
                    )
                )
    for name in config.server.options:
        if name in ("host", "port"):
            problems.append(Problem(f"server.options.{name}", "twinpool decides this option", f"Set server.{name}"))
        elif name not in options.frontend:
            problems.append(
                _unknown(f"server.options.{name}", name, "frontend option", options.frontend, options.engine, "engine")
            )
    return problems


def _unknown(
    path: str, name: str, kind: str, known: Iterable[str], elsewhere: Iterable[str], elsewhere_path: str
) -> Problem:
    plain = name.replace("-", "_")
    if plain in ("host", "port"):
        remedy = f"Set server.{plain} instead"
    elif plain in elsewhere:
        remedy = f"Move it to {elsewhere_path}.{plain}"
    elif guess := did_you_mean(name, known):
        remedy = f"Did you mean {guess}? Otherwise remove it"
    else:
        remedy = "Remove it, or see vLLM's documentation for the names"
    return Problem(path, f"vLLM has no {kind} of this name", remedy)


def port_problems(config: ClusterConfig) -> list[Problem]:
    """Whether the API server can listen where it should."""
    host, port = config.server.host, config.server.port
    if config.server.options.get("uds"):
        return []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, ValueError) as error:  # `ValueError`: what cannot even be looked up
        reason = getattr(error, "strerror", None) or error
        return [
            Problem("server.host", f"{host!r} is no address of this machine ({reason})", "Use 127.0.0.1 or 0.0.0.0")
        ]
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return [_port_problem(host, port, error)]
    return []


def _port_problem(host: str, port: int, error: OSError) -> Problem:
    match error.errno:
        case errno.EADDRINUSE:
            return Problem(
                "server.port", f"port {port} on {host} is taken", f"Stop what uses it, or set server.port={port + 1}"
            )
        case errno.EACCES:
            return Problem("server.port", f"this user may not listen on port {port}", "Use a port above 1023")
        case errno.EADDRNOTAVAIL:
            return Problem("server.host", f"{host!r} is no address of this machine", "Use 127.0.0.1 or 0.0.0.0")
    return Problem("server.port", f"cannot listen on {host}:{port}: {error.strerror}", "Choose another host or port")


def slo_problems(config: ClusterConfig) -> list[Problem]:
    """Keys of classes that the API server would turn away. Keys are never shown."""
    accepted = config.server.options.get("api_key")
    if not accepted:
        return []
    keys = {str(key) for key in (accepted if isinstance(accepted, list) else [accepted])}
    return [
        Problem(
            f"slo.classes.{name}.api_keys.{index}",
            "server.options.api_key does not have this key, so its requests would be answered 401",
            "Add it there",
        )
        for name, kind in config.slo.classes.items()
        for index, key in enumerate(kind.api_keys)
        if key.get_secret_value() not in keys
    ]


def number_problems(config: ClusterConfig) -> list[Problem]:
    """Options that the checks below calculate with must be numbers."""
    return [
        Problem(f"{path}.{name}", f"found {given[name]!r}, expected a whole number above 0", "Correct the value")
        for path, given in _engine_tables(config)
        for name in _WHOLE_NUMBERS
        if name in given and not is_count(given[name]) and not (name == "max_model_len" and given[name] in (-1, "auto"))
    ]


def parallel_problems(config: ClusterConfig, model: ModelFacts | None) -> list[Problem]:
    """Ranks that would get a fraction of a head."""
    if model is None or model.num_heads is None:
        return []
    problems = []
    for role in ROLES:
        ranks = config.pools.of(role).tensor_parallel
        fitting = [n for n in range(1, model.num_heads + 1) if model.heads_divide(n)]
        if config.pools.of(role).replicas and ranks not in fitting:
            problems.append(
                Problem(
                    f"pools.{role}.tensor_parallel",
                    f"{ranks} ranks cannot share the model's {model.num_heads} attention heads"
                    + (f" and {model.num_kv_heads} KV heads" if model.num_kv_heads else ""),
                    f"Use one of {', '.join(map(str, fitting))}",
                )
            )
    return problems


def engine_problems(
    config: ClusterConfig, plan: WorkerPlan, machine: Machine, model: ModelFacts | None
) -> list[Problem]:
    """What the engine of one worker would refuse, or accept and then be of no use with."""
    block_size = plan.engine.get("block_size") or (CPU_BLOCK_SIZE if machine.on_cpu else GPU_BLOCK_SIZE)
    other_attention = model is not None and (model.num_layers is None or model.latent_width is not None)
    if machine.on_cpu and not other_attention and block_size % _CPU_BLOCK_MULTIPLE:
        return [
            Problem(
                path_of(config, plan, "block_size"),
                f"a block of {block_size} tokens does not suit CPU attention, which wants a multiple of "
                f"{_CPU_BLOCK_MULTIPLE}",
                f"Use {_CPU_BLOCK_MULTIPLE * max(1, round(block_size / _CPU_BLOCK_MULTIPLE))}, or leave it out for "
                f"{CPU_BLOCK_SIZE}",
            )
        ]
    if machine.on_cpu and plan.engine.get("enable_sleep_mode"):
        what = "the engines compute on CPUs, and vLLM's engines can sleep on GPUs only"
        return [Problem(path_of(config, plan, "enable_sleep_mode"), what, "Remove it")]
    asked = plan.engine.get("max_model_len")
    limit = model.max_positions if model is not None else None
    if isinstance(asked, int) and limit is not None and asked > limit and not _may_be_longer(plan, machine):
        return [
            Problem(
                "engine.max_model_len",
                f"{asked} is beyond the {limit} tokens the model was made for",
                f"Use at most {limit}",
            )
        ]
    return []


def _may_be_longer(plan: WorkerPlan, machine: Machine) -> bool:
    """vLLM takes any length where the operator says so in the environment."""
    name = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    return (plan.env.get(name) or machine.environ.get(name, "0")).strip().lower() in ("1", "true")


def _engine_tables(config: ClusterConfig) -> list[tuple[str, Mapping[str, Any]]]:
    pools: list[tuple[Role, PoolConfig]] = [(role, config.pools.of(role)) for role in ROLES]
    return [("engine", config.engine), *((f"pools.{role}.engine", pool.engine) for role, pool in pools)]
