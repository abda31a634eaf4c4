"""What a configuration asks of Ray that cannot be had, before Ray is asked."""

import importlib.util

from cluster.config import ROLES, ClusterConfig, Role
from cluster.preflight.problems import Problem

_CLAIMED_OTHERWISE = {
    "GPU": "a worker claims one per rank; see pools.<role>.tensor_parallel",
    "CPU": "see ray.cpus_per_rank",
}


def ray_problems(config: ClusterConfig) -> list[Problem]:
    """Of a configuration with `launch: ray`."""
    problems = []
    if importlib.util.find_spec("ray") is None:
        problems.append(
            Problem(
                "launch",
                "found 'ray', and Ray is not installed here",
                "Install twinpool with its extra `ray` on every node: pip install 'twinpool[ray]'",
            )
        )
    if config.transfer.bind_host:
        problems.append(
            Problem(
                "transfer.bind_host",
                "under Ray every worker listens on its own node's address",
                "Remove it",
            )
        )
    if config.simulation.enabled and config.simulation.workers_per_process > 1:
        problems.append(
            Problem(
                "simulation.workers_per_process",
                f"found {config.simulation.workers_per_process}; workers of one process would all be on one node",
                "Set it to 1",
            )
        )
    for role in ROLES:
        problems += _pool_problems(config, role)
    return list(dict.fromkeys(problems))


def _pool_problems(config: ClusterConfig, role: Role) -> list[Problem]:
    pool = config.pools.of(role)
    problems = [
        Problem(f"ray.resources.{role}.{name}", f"{name} is claimed already, {why}", "Remove it")
        for name, why in _CLAIMED_OTHERWISE.items()
        if name in config.ray.resources.get(role, {})
    ]
    if "CUDA_VISIBLE_DEVICES" in pool.env:
        problems.append(
            Problem(
                f"pools.{role}.env.CUDA_VISIBLE_DEVICES",
                "Ray deals out the GPUs of its nodes",
                "Remove it; ray.resources can name the kind of node",
            )
        )
    for where, options in (("engine", config.engine), (f"pools.{role}.engine", pool.engine)):
        if options.get("distributed_executor_backend") not in (None, "mp"):
            problems.append(
                Problem(
                    f"{where}.distributed_executor_backend",
                    f"found {options['distributed_executor_backend']!r}, and twinpool decides this",
                    "Remove it; pools.<role>.across_nodes=true is for workers whose ranks do not fit on one node",
                )
            )
    return problems
