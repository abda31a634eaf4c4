"""Sends one request with the `openai` package and brings the reply into a form that two servers must share.

Ids and times are replaced by words that keep whether they were there; a stream is folded, because vLLM may
put several tokens into one chunk when the reader is slow: texts, logprobs and token ids are concatenated
per choice, while roles, finish reasons and usages keep their number and order.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import openai

from lab.server_process import Server
from tests.engine.servers import PLAIN_HTTP, REQUEST_DEADLINE_S

Json = Any
Route = Literal["chat", "completions", "responses"]

_IDS = frozenset({"id", "item_id", "request_id", "previous_response_id"})
_TIMES = frozenset({"created", "created_at", "completed_at"})


@dataclass(frozen=True)
class Case:
    """One request, by the names the OpenAI API gives its fields."""

    name: str
    route: Route
    body: Mapping[str, Any]
    warm: bool = False
    """Sent a second time; the second reply is compared."""
    logprob_tolerance: float = 0.0
    """Not zero where the two servers compute the same number with different shapes."""
    checks: tuple[str, ...] = field(default=())
    """Strings the yardstick's reply must contain, so that the case shows what its name says."""


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    content_type: str
    body: Json


def openai_client(server: Server, api_key: str = "") -> openai.OpenAI:
    key = api_key or server.api_key
    http_client = openai.DefaultHttpxClient(verify=PLAIN_HTTP)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=REQUEST_DEADLINE_S, http_client=http_client
    )


def _method(client: openai.OpenAI, route: Route) -> Any:
    if route == "chat":
        return client.chat.completions
    return client.completions if route == "completions" else client.responses


def send(client: openai.OpenAI, case: Case) -> Reply:
    """Sends a case; a 4xx or 5xx is a reply like any other."""
    resource = _method(client, case.route)
    known = inspect.signature(resource.create).parameters
    named = {key: value for key, value in case.body.items() if key in known}
    extra = {key: value for key, value in case.body.items() if key not in known}
    try:
        raw = resource.with_raw_response.create(**named, extra_body=extra)
        parsed = raw.parse()
    except openai.APIStatusError as error:
        return Reply(
            error.status_code, error.response.headers["content-type"], without_ids_and_times(error.response.json())
        )
    content_type: str = raw.headers["content-type"]
    if not case.body.get("stream"):
        return Reply(raw.status_code, content_type, without_ids_and_times(parsed.to_dict(mode="json")))
    chunks = [chunk.to_dict(mode="json") for chunk in parsed]
    fold = fold_events if case.route == "responses" else fold_chunks
    return Reply(raw.status_code, content_type, fold(chunks))


def without_ids_and_times(value: Json) -> Json:
    """Ids and times become `<id>` and `<time>`; null stays null."""
    if isinstance(value, list):
        return [without_ids_and_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    result: dict[str, Json] = {}
    for key, item in value.items():
        if key in _IDS and isinstance(item, str):
            result[key] = "<id>"
        elif key in _TIMES and item is not None:
            result[key] = "<time>"
        else:
            result[key] = without_ids_and_times(item)
    return result


def _append(into: dict[str, Json], key: str, piece: Json) -> None:
    """Concatenates strings, lists and the lists inside a dict of lists (logprobs); keeps null apart from absent."""
    if key not in into or into[key] is None:
        into[key] = piece
    elif isinstance(piece, str | list):
        into[key] = into[key] + piece
    elif isinstance(piece, dict):
        into[key] = dict(into[key])
        for inner, item in piece.items():
            _append(into[key], inner, item)
    elif piece is not None:
        raise ValueError(f"cannot fold {key}={piece!r} into {into[key]!r}")


def _fold_tool_calls(calls: dict[str, dict[str, Json]], pieces: Iterable[Mapping[str, Json]]) -> None:
    for piece in pieces:
        call = calls.setdefault(str(piece["index"]), {"ids": 0, "types": [], "name": "", "arguments": ""})
        call["ids"] += piece.get("id") is not None
        call["types"] += [piece["type"]] if piece.get("type") else []
        function = piece.get("function") or {}
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""


def _fold_choice(folded: dict[str, Json], choice: Mapping[str, Json]) -> None:
    for key, item in choice.items():
        if key == "delta":
            for part, piece in item.items():
                if part == "role":
                    folded.setdefault("roles", []).extend([piece] if piece else [])
                elif part == "tool_calls":
                    _fold_tool_calls(folded.setdefault("tool_calls", {}), piece or [])
                else:
                    _append(folded, part, piece)
        elif key in ("finish_reason", "stop_reason"):
            folded.setdefault(f"{key}s", []).extend([item] if item is not None else [])
        elif key in ("text", "logprobs", "token_ids", "prompt_token_ids"):
            _append(folded, key, item)
        elif key != "index":
            folded[key] = item


def fold_chunks(chunks: list[dict[str, Json]]) -> Json:
    """Folds the chunks of a completions or chat stream."""
    choices: dict[int, dict[str, Json]] = {}
    usages: list[Json] = []
    shared: dict[str, list[Json]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _fold_choice(choices.setdefault(choice["index"], {}), choice)
        if chunk.get("usage") is not None:
            usages.append(chunk["usage"])
        for key, item in chunk.items():
            if key not in ("choices", "usage") and item not in shared.setdefault(key, []):
                shared[key].append(item)
    counted = [usage["completion_tokens"] for usage in usages]
    return {
        "choices": {str(index): choices[index] for index in sorted(choices)},
        # A chat stream opens with a chunk that holds the role alone; a completions stream with its first tokens.
        "opening": without_ids_and_times(chunks[0]) if chunks[0]["object"] == "chat.completion.chunk" else None,
        "last_chunk_has_no_choices": not chunks[-1]["choices"],
        "last_usage": usages[-1] if usages else None,
        "usage_only_grows": counted == sorted(counted),
        "usage_in_every_chunk": len(usages) == len(chunks),
        # One id, one model and one time for the whole stream; the fingerprint may come late.
        "distinct": {key: len(items) for key, items in shared.items() if key != "system_fingerprint"},
        "model": shared.get("model"),
        "object": shared.get("object"),
    }


def fold_events(events: list[dict[str, Json]]) -> Json:
    """Folds the events of a responses stream: neighbouring deltas of one item become one."""
    folded: list[dict[str, Json]] = []
    numbers = [event["sequence_number"] for event in events]
    for event in events:
        event = without_ids_and_times({key: item for key, item in event.items() if key != "sequence_number"})
        if folded and event["type"].endswith(".delta") and folded[-1]["type"] == event["type"]:
            folded[-1]["delta"] += event["delta"]
            folded[-1]["logprobs"] = (folded[-1].get("logprobs") or []) + (event.get("logprobs") or [])
        else:
            folded.append(event)
    return {"events": folded, "numbered_without_gap": numbers == list(range(len(numbers)))}


def difference(ours: Json, theirs: Json, tolerance: float = 0.0, path: str = "reply") -> str:
    """The first place where two replies differ, in words; empty when they agree. `tolerance` is for floats only."""
    if isinstance(ours, float | int) and isinstance(theirs, float | int) and not isinstance(ours, bool):
        return "" if abs(ours - theirs) <= tolerance else f"{path}: {ours!r}, but a single vLLM server says {theirs!r}"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return (
                f"{path}: only here {sorted(map(str, ours.keys() - theirs.keys()))}, "
                f"only at vLLM {sorted(map(str, theirs.keys() - ours.keys()))}"
            )
        return _first(lambda key: difference(ours[key], theirs[key], tolerance, f"{path}.{key}"), ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} items {ours!r}, but a single vLLM server has {len(theirs)}: {theirs!r}"
        return _first(lambda at: difference(ours[at], theirs[at], tolerance, f"{path}[{at}]"), range(len(ours)))
    return "" if ours == theirs else f"{path}: {ours!r}, but a single vLLM server says {theirs!r}"


def _first(compare: Callable[[Any], str], keys: Iterable[Any]) -> str:
    return next((found for key in keys if (found := compare(key))), "")
