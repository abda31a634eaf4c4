"""Decides which simulated workers run in which process, and how to start those."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from cluster.config import ROLES, ClusterConfig, Role
from cluster.launch.local import WorkerCommand
from cluster.launch.worker_plan import WorkerPlan
from cluster.preflight.model_facts import ModelFacts
from cluster.preflight.problems import Problem
from cluster.simulated.engine.vocabulary import word_tokens
from cluster.simulated.settings import (
    SimulatedSettings,
    SimulatedWorkerName,
    read_simulated_settings,
    write_simulated_settings,
)
from cluster.trust import cluster_key, proxy_address

_MODULE = "cluster.simulated"
_DEFAULT_MODEL_LEN = 32_768


class SimulatedPlanner:
    """Plans workers that need no cores of their own; see `cluster.launch.worker_plan.WorkerPlanner`."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._next = dict.fromkeys(ROLES, 0)

    def first(self) -> list[WorkerPlan]:
        """The workers that the cluster starts with, prefill first."""
        return [self.next(role) for role in ROLES for _ in range(self._config.pools.of(role).replicas)]

    def next(self, role: Role) -> WorkerPlan:
        """One more worker of a pool, with an id that none has had."""
        worker_id = f"{role}-{self._next[role]}"
        self._next[role] += 1
        return WorkerPlan(worker_id=worker_id, role=role, engine={}, env={}, cores=(), simulated=True)

    @property
    def devices(self) -> int | None:
        """There are none to run out of."""
        return None

    def left(self, worker_id: str) -> None:
        """Nothing to take back."""


def simulation_problems(config: ClusterConfig) -> list[Problem]:
    """What a configuration asks of simulated workers that they cannot do."""
    problems = []
    for role in ROLES:
        pool = config.pools.of(role)
        if pool.tensor_parallel != 1:
            problems.append(
                Problem(
                    f"pools.{role}.tensor_parallel",
                    f"found {pool.tensor_parallel}; a simulated worker has one rank",
                    "Leave it out, and give the speed of the whole worker in simulation",
                )
            )
        if pool.env:
            problems.append(
                Problem(f"pools.{role}.env", "simulated workers share processes and read no environment", "Remove it")
            )
    simulation = config.simulation
    room = simulation.num_blocks * simulation.block_size
    if simulation.max_model_len is not None and simulation.max_model_len > room:
        problems.append(
            Problem(
                "simulation.max_model_len",
                f"{simulation.num_blocks} blocks of {simulation.block_size} tokens cannot hold one request of "
                f"{simulation.max_model_len}",
                "Raise simulation.num_blocks, or lower it",
            )
        )
    return problems


def simulated_commands(
    plans: Sequence[WorkerPlan],
    config: ClusterConfig,
    model: str,
    facts: ModelFacts | None,
    runtime_dir: Path,
    base_env: Mapping[str, str],
) -> list[WorkerCommand]:
    """Writes the settings of every process into the runtime directory and says how to start them."""
    size = config.simulation.workers_per_process
    words = word_tokens(Path(model))
    commands = []
    for number, first in enumerate(range(0, len(plans), size)):
        together = plans[first : first + size]
        name = f"simulated-{number}" if len(together) > 1 else together[0].worker_id
        settings = SimulatedSettings(
            name=name,
            workers=[SimulatedWorkerName(worker_id=plan.worker_id, role=plan.role) for plan in together],
            proxy_address=proxy_address(runtime_dir, config.security),
            key=cluster_key(config),
            runtime_dir=runtime_dir,
            model=model,
            max_model_len=_max_model_len(config, facts),
            words=words,
            simulation=config.simulation,
            transfer=config.transfer,
            liveness=config.liveness,
            prefix_events=config.scheduling.prefix_events and config.simulation.prefix_caching,
            drain_timeout_s=config.drain_timeout_s,
        )
        commands.append(
            WorkerCommand(
                worker_id=together[0].worker_id,
                role=together[0].role,
                argv=(sys.executable, "-m", _MODULE, str(write_simulated_settings(settings))),
                env=MappingProxyType(dict(base_env)),
                log_path=runtime_dir / f"{name}.log",
                others=tuple((plan.worker_id, plan.role) for plan in together[1:]),
            )
        )
    return commands


def is_simulated(command: WorkerCommand) -> bool:
    """Whether this starts simulated workers."""
    return _MODULE in command.argv


def simulated_in_role(command: WorkerCommand, worker_id: str, role: str) -> WorkerCommand:
    """The same process, but with this worker in another role when it is started again; its settings are rewritten."""
    settings = read_simulated_settings(Path(command.argv[-1]))
    names = [
        name.model_copy(update={"role": role}) if name.worker_id == worker_id else name for name in settings.workers
    ]
    write_simulated_settings(settings.model_copy(update={"workers": names}))
    first, *others = ((name.worker_id, str(name.role)) for name in names)
    return replace(command, role=first[1], others=tuple(others))


def simulated_without(command: WorkerCommand, worker_id: str) -> WorkerCommand | None:
    """The same process, but without this worker when it is started again; None if no other lives there."""
    settings = read_simulated_settings(Path(command.argv[-1]))
    names = [name for name in settings.workers if name.worker_id != worker_id]
    if not names:
        return None
    write_simulated_settings(settings.model_copy(update={"workers": names}))
    first, *others = ((name.worker_id, str(name.role)) for name in names)
    return replace(command, worker_id=first[0], role=first[1], others=tuple(others))


def _max_model_len(config: ClusterConfig, facts: ModelFacts | None) -> int:
    simulation = config.simulation
    if simulation.max_model_len is not None:
        return simulation.max_model_len
    of_model = facts.max_positions if facts is not None else None
    return min(of_model or _DEFAULT_MODEL_LEN, simulation.num_blocks * simulation.block_size)
