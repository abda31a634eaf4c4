"""Reads the configuration from a YAML file and from overrides like `pools.decode.replicas=2`."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config import ClusterConfig
from cluster.preflight.problems import ConfigError, Problem, did_you_mean

# Fields whose values are never shown.
_SECRETS = {"admin_key", "api_key", "api_keys"}
# PyYAML raises `ValueError` for what looks like a date and is none.
_NO_YAML = (yaml.YAMLError, ValueError)

Tree = TypeVar("Tree", bound=BaseModel)


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice; PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # refused below, with its place
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The configuration of a file (or the defaults) with overrides on top; raises `ConfigError`."""
    return validated(ClusterConfig, overridden(read_tree(path) if path is not None else {}, overrides))


def validated(kind: type[Tree], tree: Mapping[str, Any], at: str = "") -> Tree:
    """The typed tree; raises `ConfigError`. `at` is the path of `tree` in its file, with a dot at the end."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = _one_per_field([_problem(details, kind) for details in error.errors()])
        raise ConfigError(
            replace(problem, field=f"{at}{problem.field}".rstrip(".: ")) for problem in problems
        ) from error


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree` with overrides like `field=value` put into it; raises `ConfigError`."""
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _one_per_field(problems: Sequence[Problem]) -> list[Problem]:
    """A field that may be one of several types fails once per type; the operator reads one sentence."""
    merged: dict[str, Problem] = {}
    for problem in problems:
        first = merged.setdefault(problem.field, problem)
        if first is not problem and first.what != problem.what:
            merged[problem.field] = replace(first, remedy=f"{first.remedy}, or {_lower_first(problem.remedy)}")
    return list(merged.values())


def read_tree(path: Path) -> dict[str, Any]:
    """What a YAML file holds; raises `ConfigError` unless it is fields and values."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            [Problem("", f"cannot read the configuration file {path}: {error.strerror}", "Check the path")]
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"{path} is not UTF-8 text", "Give a YAML file")]) from error
    try:
        tree = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except _NO_YAML as error:
        raise ConfigError(
            [Problem("", f"{path} is not valid YAML: {_yaml_fault(error)}", "Correct that line")]
        ) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            [
                Problem(
                    "",
                    f"{path} holds a {type(tree).__name__}, expected fields and values",
                    "Start it with `model: ...`",
                )
            ]
        )
    return tree


def _yaml_fault(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return str(error).splitlines()[0]


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise ConfigError(
            [
                Problem(
                    "",
                    f"the override {override!r} is not of the form field=value",
                    "Write e.g. pools.decode.replicas=2",
                )
            ]
        )
    try:
        value = yaml.load(text, Loader=_StrictLoader) if text else ""  # noqa: S506 - a SafeLoader
    except _NO_YAML as error:
        raise ConfigError(
            [Problem(path, f"the value {text!r} is not valid YAML: {_yaml_fault(error)}", "Quote it")]
        ) from error
    *parents, last = path.split(".")
    node = tree
    for depth, name in enumerate(parents, start=1):
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            at = ".".join(parents[:depth])
            raise ConfigError([Problem(at, f"is {child!r} and has no field {last!r}", f"Remove {at} from the file")])
        node = child
    node[last] = value


def _problem(details: ErrorDetails, kind: type[BaseModel]) -> Problem:
    """A pydantic error as a sentence with the field's path and a remedy."""
    # Branches of a union appear in `loc` as names that are no fields ("constrained-int"); they are left out.
    path, model = _field_path(details["loc"], kind)
    found = "a secret" if _SECRETS.intersection(details["loc"]) else repr(details["input"])
    context = details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            name = str(details["loc"][-1])
            known = sorted(model.model_fields) if model is not None else []
            guess = did_you_mean(name, known)
            remedy = f"Did you mean {guess}?" if guess else "Remove it."
            return Problem(path, "unknown field", f"{remedy} Known here: {', '.join(known)}")
        case "value_error":
            reason = str(context.get("error", details["msg"]))
            what, _, remedy = reason.partition("; ")
            return Problem(path, what, remedy[:1].upper() + remedy[1:] if remedy else "Change one of them")
        case "literal_error":
            return Problem(path, f"found {found}", f"Use one of {context.get('expected', '')}")
        case "model_type" | "dict_type":
            return Problem(path, f"found {found}, expected fields below it", f"Write {path}: and its fields indented")
    return Problem(path, f"found {found}; {_lower_first(details['msg'])}", "Correct the value")


def _field_path(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path of an error and the model that its last field was looked up in."""
    names: list[str] = []
    model: type[BaseModel] | None = root
    inside: type[BaseModel] | None = root
    by_name = False
    for part in loc:
        inside = model
        if isinstance(part, int) or by_name:
            names.append(str(part))
            by_name = False
            continue
        if model is not None:
            field = model.model_fields.get(part)
            names.append(part)
            model = _nested_model(field.annotation) if field is not None else None
            by_name = field is not None and model is not None and get_origin(field.annotation) is dict
        elif not _is_union_branch(part):
            names.append(part)
    return ".".join(names), inside


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _is_union_branch(part: str) -> bool:
    return part in {"int", "str", "float", "bool"} or "[" in part or part.startswith(("constrained-", "literal"))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
