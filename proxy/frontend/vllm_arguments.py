"""vLLM's server arguments from the cluster's configuration.

Relies on vLLM 0.32: `make_arg_parser`, `AsyncEngineArgs.from_cli_args`, `validate_parsed_serve_args`, argparse's
`_option_string_actions` (to know how an option wants its values).
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cluster.config import ClusterConfig
from cluster.embedded_model import EMBEDDED_MODEL_NAME

STATUS_LINE = "proxy.middleware.status_line.StatusLine"
TRANSFER_PARAMS_GUARD = "proxy.middleware.transfer_params_guard.TransferParamsGuard"

# Ours are quiet by default; `server.options` may say otherwise.
QUIET = {"disable_uvicorn_access_log": True, "uvicorn_log_level": "warning"}

# The proxy's own engine configuration decides limits and templates only; these would make vLLM look for devices.
WORKERS_ONLY = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "kv_transfer_config",
    "enable_sleep_mode",
)


class ServerOptionError(Exception):
    """An option that vLLM refuses, with the field it came from."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not typed for us
    def error(self, message: str) -> NoReturn:
        raise ServerOptionError(f"server.options: {message}")


def server_arguments(config: ClusterConfig, model_path: str) -> tuple[argparse.Namespace, AsyncEngineArgs]:
    """Everything vLLM's API server wants to know. Raises `ServerOptionError`."""
    parser = make_arg_parser(_Parser())
    options = {**QUIET, **config.server.options}
    args = parser.parse_args(_as_command_line(parser, options))
    # Last is outermost.
    args.middleware = [*args.middleware, TRANSFER_PARAMS_GUARD, STATUS_LINE]
    args.host, args.port = config.server.host, config.server.port
    args.model = args.model_tag = model_path
    args.served_model_name = _served_names(config)
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name, value in config.engine.items():
        if name not in names:
            raise ServerOptionError(f"engine.{name} is not an engine option of the installed vLLM")
        if name not in WORKERS_ONLY:
            setattr(args, name, value)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(args)
        # Engine options given as plain data have become vLLM's own types now; the server reads some of them.
        for name in names:
            setattr(args, name, getattr(engine_args, name))
        validate_parsed_serve_args(args)
        _import_parser_plugins(args)
        validate_api_server_args(args)
    except (ValueError, TypeError, KeyError) as error:
        raise ServerOptionError(f"vLLM refuses the engine or server options: {error}") from error
    return args, engine_args


def _import_parser_plugins(args: argparse.Namespace) -> None:
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)


def _served_names(config: ClusterConfig) -> list[str]:
    """The first one is the model's own; classes of requests may have given it more."""
    own = config.served_model_name or config.model or EMBEDDED_MODEL_NAME
    adapters = {str(module.get("name")) for module in _lora_modules(config)}
    further = [name for kind in config.slo.classes.values() for name in kind.models]
    return list(dict.fromkeys([own, *(name for name in further if name not in adapters)]))


def _lora_modules(config: ClusterConfig) -> list[Mapping[str, Any]]:
    modules = config.server.options.get("lora_modules") or []
    return [module for module in modules if isinstance(module, Mapping)] if isinstance(modules, list) else []


def _as_command_line(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> list[str]:
    """The options as vLLM's own parser reads them, so that it converts and checks the values."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        action = parser._option_string_actions.get(flag)
        if action is None:
            raise ServerOptionError(f"server.options.{name} is not a flag of vLLM's API server")
        words += _one_option(flag, action, value)
    return words


def _one_option(flag: str, action: argparse.Action, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        if value:
            return [flag]
        return ["--no-" + flag[2:]] if isinstance(action, argparse.BooleanOptionalAction) else []
    if isinstance(value, list) and action.type is not json.loads:
        texts = [item if isinstance(item, str) else json.dumps(item) for item in value]
        if action.nargs in ("+", "*"):
            return [flag, *texts]
        return [word for text in texts for word in (flag, text)]
    return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]
