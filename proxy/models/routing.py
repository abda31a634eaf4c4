"""Says for which model a request is, and how its path reads there. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from proxy.models.answers import Refused

PREFIX = "/models/"
"""`/models/NAME/...` is the path `...` of the model NAME, whatever the body says."""
_OBSERVING_METHODS = ("GET", "HEAD", "OPTIONS")
_OBSERVING_PATHS = ("/twinpool/", "/admin/")
_PATHS_OF_THE_FRONT = ("/twinpool/sleep", "/twinpool/wake", "/sleep", "/wake_up")
"""Of a cluster, and not of one behind a front, which decides when its models sleep."""
_ADAPTER_PATHS = ("/load_lora_adapter", "/unload_lora_adapter")
"""Have the cluster read any directory, or take from all clients what they use."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes."""

    model: str
    """Its name on the map."""
    path: str
    """As it is percent-encoded, without the query."""
    observes: bool
    """It looks at a model that is up, or orders something there, and is no reason to start or to keep it."""


def is_order(method: str, path: str) -> bool:
    """Whether it is for operators: about models, or about workers or adapters of one. `path` is not percent-encoded."""
    if "/admin/" in path or path.endswith(_ADAPTER_PATHS):
        return True
    return "/twinpool/" in path and method not in _OBSERVING_METHODS


class _Asked(msgspec.Struct):
    model: str | None = None


def find_target(
    method: str, raw_path: str, content_type: str, body: bytes, listed: Iterable[str], names: Mapping[str, str]
) -> Target | Refused:
    """Where a request goes, or why it goes nowhere.

    Args:
        method: of HTTP.
        raw_path: percent-encoded, without the query.
        content_type: empty if there is none.
        body: the whole body.
        listed: the models on the map.
        names: every name that means one of them, also theirs.
    """
    listed = list(listed)
    if raw_path.startswith(PREFIX):
        return _of_prefix(method, raw_path, listed)
    asked = _model_of(content_type, body)
    if asked is not None:
        name = names.get(asked)
        return Refused.unknown(asked) if name is None else _at(name, method, raw_path)
    if len(listed) == 1:
        return _at(listed[0], method, raw_path)
    text = (
        f"it is not clear for which of {len(listed)} models {method} {raw_path[:200]} is; name it in the field "
        f"`model` of a JSON body, or put {PREFIX}NAME before the path"
    )
    return Refused(400, "no_model_named", text)


def _of_prefix(method: str, raw_path: str, listed: list[str]) -> Target | Refused:
    path = raw_path.removeprefix(PREFIX)
    longest = max(map(len, listed), default=0) * 3  # a name with every character percent-encoded
    ends = [match.start() for match in re.finditer("/", path[: longest + 1])]
    for end in reversed(ends):  # the longest name first
        if (name := unquote(path[:end])) in listed:
            return _at(name, method, path[end:])
    return Refused.unknown(raw_path.removeprefix(PREFIX))


def _at(name: str, method: str, path: str) -> Target | Refused:
    if unquote(path).rstrip("/") in _PATHS_OF_THE_FRONT:
        text = "the front decides when its models sleep; see `sleep` and `max_asleep` of its configuration"
        return Refused(409, "front_decides", text)
    return Target(name, path, _observes(method, path))


def _observes(method: str, path: str) -> bool:
    return method in _OBSERVING_METHODS or path.startswith(_OBSERVING_PATHS)


def _model_of(content_type: str, body: bytes) -> str | None:
    """The field `model` of a JSON object; None if there is none, or this is something else."""
    if not body or content_type.partition(";")[0].strip().lower() not in ("", "application/json"):
        return None
    try:
        return msgspec.json.decode(body, type=_Asked).model
    except (msgspec.DecodeError, RecursionError):  # the latter with arrays nested some thousand deep
        return None
