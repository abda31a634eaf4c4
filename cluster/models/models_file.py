"""Reads the configuration of several models, and what it says about each one's cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.launch.worker_plan import WorkerPlan
from cluster.models.config import FrontConfig, ModelConfig, ModelsConfig
from cluster.preflight.config_checks import check_config, vllm_option_problems
from cluster.preflight.config_file import overridden, read_tree, validated
from cluster.preflight.machine import Machine, engines_use_gpus
from cluster.preflight.model_facts import read_model_facts
from cluster.preflight.problems import ConfigError, Problem
from cluster.preflight.security_checks import API_KEY_VARIABLE, is_of_this_machine
from cluster.preflight.vllm_options import installed_vllm_options

# The front sets the first and has the others itself.
_OPTIONS_OF_THE_FRONT = ("uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "root_path")


_SLEEP_MODE = "enable_sleep_mode"


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be started."""

    name: str
    config: ModelConfig
    tree: Mapping[str, Any]
    """Its cluster as it was written, under the model's name."""
    cluster: ClusterConfig
    """The same, typed."""

    @property
    def aliases(self) -> list[str]:
        """Further names under which its API server serves from the start: of classes, and of LoRA modules."""
        names = [name for kind in self.cluster.slo.classes.values() for name in kind.models]
        modules = self.cluster.server.options.get("lora_modules")
        names += [str(module["name"]) for module in _mappings(modules) if "name" in module]
        return [name for name in dict.fromkeys(names) if name != self.name]


@dataclass(frozen=True)
class Models:
    """The whole configuration."""

    config: ModelsConfig
    specs: tuple[ModelSpec, ...]
    added_models: Path | None = None
    """Where models that are added later are remembered."""


def is_models_file(path: Path) -> bool:
    """Whether a file is about several models; what is wrong with it otherwise is for its reader to say."""
    try:
        return "models" in read_tree(path)
    except ConfigError:
        return False


def load_models(path: Path, overrides: Sequence[str] = ()) -> Models:
    """The configuration of a file with overrides on top; raises `ConfigError`."""
    config = validated(ModelsConfig, overridden(read_tree(path), overrides))
    specs: list[ModelSpec] = []
    problems: list[Problem] = []
    for name, model in config.models.items():
        try:
            specs.append(read_model(name, model, path.parent))
        except ConfigError as error:
            problems += error.problems
    problems += name_problems(specs)
    if config.capacity is not None:
        costs = {name: (model.policy == "pinned", model.cost) for name, model in config.models.items()}
        problems += capacity_problems(costs, config.capacity)
    if problems:
        raise ConfigError(problems)
    added = path.parent / Path(config.added_models).expanduser() if config.added_models is not None else None
    return Models(config, tuple(specs), added)


def read_model(name: str, model: ModelConfig, base: Path) -> ModelSpec:
    """One model with its cluster; a relative path starts at `base`. Raises `ConfigError`."""
    at = f"models.{name}.cluster."
    tree: dict[str, Any] = dict(model.cluster)
    if model.config is not None:
        file = base / Path(model.config).expanduser()
        at = f"{file}: "
        tree = read_tree(file)
    tree["served_model_name"] = tree.get("served_model_name") or name
    if model.sleep:
        tree = _that_can_sleep(tree)
    cluster = validated(ClusterConfig, tree, at)
    problems = []
    if cluster.served_model_name != name:
        problems.append(
            Problem(
                f"{at}served_model_name",
                f"found {cluster.served_model_name!r}, and the model is asked for as {name!r}",
                "Remove it; for further names see slo.classes",
            )
        )
    given = cluster.server.model_fields_set & {"host", "port"}
    given |= {f"options.{option}" for option in _OPTIONS_OF_THE_FRONT if option in cluster.server.options}
    problems += [
        Problem(f"{at}server.{field}", "the model is reached through the address of all models", "Remove it")
        for field in sorted(given)
    ]
    if problems:
        raise ConfigError(problems)
    return ModelSpec(name, model, tree, cluster)


def _that_can_sleep(tree: dict[str, Any]) -> dict[str, Any]:
    """Engines that are simulated always can; real ones must be started so. What is malformed is for others to say."""
    engine = tree.get("engine") or {}
    return {**tree, "engine": {_SLEEP_MODE: True, **engine}} if isinstance(engine, dict) else tree


def name_problems(specs: Sequence[ModelSpec]) -> list[Problem]:
    """Names that would mean two models."""
    owners = {spec.name: spec.name for spec in specs}
    problems = []
    for spec in specs:
        for alias in spec.aliases:
            owner = owners.setdefault(alias, spec.name)
            if owner != spec.name:
                problems.append(
                    Problem(
                        f"models.{spec.name}",
                        f"it is also served as {alias!r}, and so is {owner}",
                        "Choose other names",
                    )
                )
    return problems


def capacity_problems(costs: Mapping[str, tuple[bool, int]], capacity: int) -> list[Problem]:
    """Models that could never be up. `costs` says of each whether it is pinned, and its cost."""
    pinned = sum(cost for is_pinned, cost in costs.values() if is_pinned)
    if pinned > capacity:
        what = f"found {capacity}, and the pinned models take {pinned}"
        return [Problem("capacity", what, "Raise it, or pin fewer models")]
    return [
        Problem(
            f"models.{name}.cost",
            f"found {cost}; of capacity={capacity}, pinned models leave {capacity - pinned}",
            "Raise capacity, or pin fewer models",
        )
        for name, (is_pinned, cost) in costs.items()
        if not is_pinned and cost > capacity - pinned
    ]


def check_access(server: FrontConfig, environ: Mapping[str, str]) -> None:
    """Refuses, with `ConfigError`, a front that others could use and order about without a key."""
    has_key = server.api_key or environ.get(API_KEY_VARIABLE)
    if has_key or server.open_to_all or is_of_this_machine(server.host):
        return
    raise ConfigError(
        [
            Problem(
                "server.api_key",
                f"server.host={server.host} can be reached from other machines and no API key is set, so anybody "
                "there could send requests, and start processes by adding models",
                "Set server.api_key and server.admin_key, or server.host=127.0.0.1, or, where something in front of it "
                "asks for keys, server.open_to_all=true",
            )
        ]
    )


def check_models(specs: Sequence[ModelSpec], machine: Machine) -> dict[str, list[WorkerPlan]]:
    """The workers of each model, checked as if it were alone on this machine.

    Raises `ConfigError` with every problem found.
    """
    plans: dict[str, list[WorkerPlan]] = {}
    problems: list[Problem] = []
    for spec in specs:
        if asked := sleep_problems(spec, on_gpus=not machine.on_cpu):
            problems += asked
            continue
        try:
            facts = read_model_facts(spec.cluster.model) if spec.cluster.model is not None else None
            here = _as_it_sees(machine, spec.config.env)
            plans[spec.name] = check_config(_without_address(spec.cluster), here, facts).workers
        except ConfigError as error:
            problems += _below(spec.name, error.problems)
    if problems:
        raise ConfigError(problems)
    return plans


def check_options(spec: ModelSpec) -> None:
    """Checks only what does not depend on what else runs on this machine; raises `ConfigError`."""
    problems = _below(spec.name, vllm_option_problems(spec.cluster, installed_vllm_options()))
    problems += sleep_problems(spec, on_gpus=engines_use_gpus())
    if problems:
        raise ConfigError(problems)


def sleep_problems(spec: ModelSpec, *, on_gpus: bool) -> list[Problem]:
    """A model whose engines cannot sleep, and shall."""
    if not spec.config.sleep or on_gpus or spec.cluster.simulation.enabled:
        return []
    what = "its engines compute on CPUs, and vLLM's engines can sleep on GPUs only"
    return [Problem(f"models.{spec.name}.sleep", what, "Remove it; the model is stopped and started again then")]


def _as_it_sees(machine: Machine, env: Mapping[str, str]) -> Machine:
    """The machine for processes with this environment."""
    gpus = machine.gpus
    if gpus and "CUDA_VISIBLE_DEVICES" in env:
        gpus = tuple(name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    return replace(machine, environ={**machine.environ, **env}, gpus=gpus)


def _without_address(cluster: ClusterConfig) -> ClusterConfig:
    """It will listen on a private socket, so no port has to be free."""
    options = {**cluster.server.options, "uds": "/private"}
    return cluster.model_copy(update={"server": cluster.server.model_copy(update={"options": options})})


def _below(name: str, problems: Sequence[Problem]) -> list[Problem]:
    return [replace(problem, field=f"models.{name}.cluster.{problem.field}".rstrip(".")) for problem in problems]


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
