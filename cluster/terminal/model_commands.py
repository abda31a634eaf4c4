"""`twinpool model add`, `remove` and `list`: which models a front serves."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.models.messages import ModelList, ModelRemoval, ModelStatus
from cluster.preflight.config_file import overridden, read_tree
from cluster.preflight.problems import ConfigError
from cluster.terminal.server_calls import DEFAULT_URL, ApiKey, CallFailed, Url, call, fail

_LOOK_AGAIN_S = 0.3
_START_LIMIT_S = 900.0
_STOP_MARGIN_S = 60.0
EXIT_CONFIG = 2

model_app = typer.Typer(no_args_is_help=True, help="Add, remove and list the models of a front that serves several.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name under which clients ask for it.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Give the order and return at once.")]


@model_app.command("add")
def add(
    name: Name,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [FIELD=VALUE ...]",
            help="Its cluster, as for `twinpool serve`: a YAML file, and fields on top of it.",
        ),
    ] = None,
    policy: Annotated[
        Literal["pinned", "on_demand", "scale_to_zero"], typer.Option(help="When it is up; see docs/operating.md.")
    ] = "pinned",
    terms: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Another field of the model: cost=4, min_residency_s=300."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    no_wait: NoWait = False,
) -> None:
    """Put a model on the map. A pinned one is started; waits until it is up.

    It is there after the next start of the server too if the server's file says where to remember it (added_models)."""
    files = [argument for argument in arguments or [] if "=" not in argument or Path(argument).is_file()]
    if len(files) > 1:
        fail(f"one configuration file expected, got {', '.join(files)}", EXIT_CONFIG)
    try:
        tree = read_tree(Path(files[0])) if files else {}
        cluster = overridden(tree, [argument for argument in arguments or [] if argument not in files])
        body: dict[str, Any] = overridden({"name": name, "policy": policy, "cluster": cluster}, terms or [])
    except ConfigError as error:
        fail("\n".join(str(problem) for problem in error.problems), EXIT_CONFIG)
    try:
        added = call(f"{_base(url)}", api_key, ModelStatus, "POST", json.dumps(body).encode())
        if policy == "pinned" and not no_wait:
            added = _until_up(url, api_key, added)
    except CallFailed as error:
        fail(str(error), 1)
    sys.stdout.write(f"{name} is {added.state}\n")
    if not added.kept:
        sys.stdout.write(f"{name} is forgotten when the server ends; see added_models in docs/operating.md\n")


@model_app.command("remove")
def remove(
    name: Name,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Instead of drain_timeout_s of the configuration."),
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """Take a model off the map. It finishes the requests that it has, then its processes end."""
    query = f"?{urlencode({'timeout_s': timeout_s})}" if timeout_s is not None else ""
    try:
        removal = call(f"{_base(url)}/{quote(name)}{query}", api_key, ModelRemoval, "DELETE")
        if removal.returns:
            sys.stdout.write(f"{name} stands in the server's configuration and comes back with the next start\n")
        if no_wait:
            sys.stdout.write(f"{name} finishes its requests; `twinpool model list` shows how far it is\n")
            return
        _until_gone(url, api_key, name, removal.within_s + _STOP_MARGIN_S)
    except CallFailed as error:
        fail(str(error), 1)
    sys.stdout.write(f"{name} is removed\n")


@model_app.command("list")
def list_models(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as it is.")] = False,
    api_key: ApiKey = "",
) -> None:
    """Show the models, whether they are up, and their requests."""
    try:
        models = call(_base(url), api_key, ModelList)
    except CallFailed as error:
        fail(str(error), 1)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(models), indent=2).decode() + "\n")
        return
    console = Console(highlight=False)
    console.print(model_table(models))
    if models.capacity is not None:
        console.print(f"{models.used} of {models.capacity} in use")


def model_table(models: ModelList) -> Table:
    """One line per model."""
    table = Table("model", "policy", "state", "cost", "running", "waiting", "starts", "why it ended")
    for model in models.models:
        names = ", ".join([model.name, *model.aliases])
        numbers = (str(model.cost), str(model.running), str(model.waiting), str(model.starts))
        table.add_row(names, model.policy, model.state, *numbers, escape(model.cause))
    return table


def _base(url: str) -> str:
    return f"{url.rstrip('/')}/admin/models"


def _find(url: str, api_key: str, name: str) -> ModelStatus | None:
    models = call(_base(url), api_key, ModelList).models
    return next((model for model in models if model.name == name), None)


def _until_up(url: str, api_key: str, model: ModelStatus) -> ModelStatus:
    """Raises `CallFailed` when it does not come up."""
    deadline_s = time.monotonic() + _START_LIMIT_S
    with Console(highlight=False, stderr=True).status(f"{model.name} is being started"):
        while model.state != "up":
            if model.cause:
                raise CallFailed(f"{model.name} did not come up, and is tried again: {model.cause}")
            if time.monotonic() >= deadline_s:
                late = f"{model.name} is not up after {_START_LIMIT_S:g} s: {model.state}"
                raise CallFailed(f"{late}; `twinpool model list` shows how far it is")
            time.sleep(_LOOK_AGAIN_S)
            found = _find(url, api_key, model.name)
            if found is None:
                raise CallFailed(f"{model.name} was removed meanwhile")
            model = found
    return model


def _until_gone(url: str, api_key: str, name: str, within_s: float) -> None:
    """Raises `CallFailed` when it is not gone in time."""
    deadline_s = time.monotonic() + within_s
    with Console(highlight=False, stderr=True).status(f"{name} finishes its requests"):
        while (model := _find(url, api_key, name)) is not None:
            if time.monotonic() >= deadline_s:
                raise CallFailed(f"{name} is not gone in time: {model.state}, {model.running} requests")
            time.sleep(_LOOK_AGAIN_S)
