"""The names of vLLM's options, read from vLLM's source without importing it.

Importing vLLM takes seconds; `twinpool config check` answers at once. Relies on `EngineArgs` and `AsyncEngineArgs`
in `vllm/engine/arg_utils.py` and on `BaseFrontendArgs` and `FrontendArgs` in
`vllm/entrypoints/launchers/cli_args.py` being classes with annotated fields (tests compare the names with the
imported classes and with vLLM's parser).
"""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from cluster.preflight.problems import ConfigError, Problem

_ENGINE_SOURCE = "engine/arg_utils.py"
_ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_FRONTEND_SOURCE = "entrypoints/launchers/cli_args.py"
_FRONTEND_CLASSES = ("BaseFrontendArgs", "FrontendArgs")


@dataclass(frozen=True)
class VllmOptions:
    """Names as keyword arguments, with underscores."""

    engine: frozenset[str]
    frontend: frozenset[str]


def installed_vllm_options() -> VllmOptions:
    """Reads the installed vLLM's options; raises `ConfigError` when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            [Problem("", "vLLM is not installed", "Install twinpool[cpu] on a CPU host, twinpool[gpu] on a GPU host")]
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    return VllmOptions(
        engine=_field_names(root / _ENGINE_SOURCE, _ENGINE_CLASSES),
        frontend=_field_names(root / _FRONTEND_SOURCE, _FRONTEND_CLASSES),
    )


def _field_names(source: Path, classes: tuple[str, ...]) -> frozenset[str]:
    try:
        module = ast.parse(source.read_text())
    except (OSError, SyntaxError) as error:
        raise _unexpected_vllm(source, str(error)) from error
    bodies = {node.name: node.body for node in module.body if isinstance(node, ast.ClassDef)}
    missing = [name for name in classes if name not in bodies]
    if missing:
        raise _unexpected_vllm(source, f"it has no class {', '.join(missing)}")
    return frozenset(
        statement.target.id
        for name in classes
        for statement in bodies[name]
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
    )


def _unexpected_vllm(source: Path, fault: str) -> ConfigError:
    return ConfigError(
        [Problem("", f"cannot read the options of the installed vLLM from {source}: {fault}", "Install vLLM 0.32.0")]
    )
