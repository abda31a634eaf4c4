"""Requests that the `openai` package cannot send, and routes it does not know."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.engine.replies import without_ids_and_times

_STREAM = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0, "stream": True}
_SSE_HEADERS = ("content-type", "cache-control", "x-accel-buffering", "transfer-encoding", "content-length")


@dataclass(frozen=True)
class RawCase:
    """One HTTP request."""

    name: str
    method: str
    path: str
    content: bytes = b""
    content_type: str = "application/json"


@dataclass(frozen=True)
class RawReply:
    """Status, the headers a client may rely on, and the body: JSON, or the lines of an event stream."""

    status: int
    headers: dict[str, str | None]
    body: Any


def _post(name: str, path: str, body: Any) -> RawCase:
    return RawCase(name, "POST", path, json.dumps(body).encode())


RAW_CASES: list[RawCase] = [
    RawCase("bad-json", "POST", "/v1/completions", b'{"model": "smollm2", '),
    RawCase("bad-chat-json", "POST", "/v1/chat/completions", b"not json"),
    RawCase("json-that-is-no-object", "POST", "/v1/completions", b"[1, 2]"),
    RawCase("form-instead-of-json", "POST", "/v1/completions", b"model=smollm2", "application/x-www-form-urlencoded"),
    RawCase("wrong-method", "GET", "/v1/completions"),
    _post("messages-missing", "/v1/chat/completions", {"model": "smollm2"}),
    _post("stream", "/v1/completions", _STREAM),
    _post("stream-of-an-unknown-model", "/v1/completions", {**_STREAM, "model": "other"}),
    _post("tokenize", "/tokenize", {"model": "smollm2", "prompt": "The capital of France is"}),
    _post("tokenize-chat", "/tokenize", {"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}]}),
    _post("detokenize", "/detokenize", {"model": "smollm2", "tokens": [504, 3575, 282, 4649, 314]}),
    RawCase("models", "GET", "/v1/models"),
    RawCase("version", "GET", "/version"),
    _post("messages", "/v1/messages", {
        "model": "smollm2", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "Hello!"}],
    }),
    _post("token-in-token-out", "/inference/v1/generate", {
        "token_ids": [504, 3575, 282, 4649, 314], "sampling_params": {"max_tokens": 4, "temperature": 0},
    }),
]  # fmt: skip


def send_raw(client: httpx.Client, case: RawCase) -> RawReply:
    answer = client.request(case.method, case.path, content=case.content, headers={"content-type": case.content_type})
    headers = {name: answer.headers.get(name) for name in _SSE_HEADERS if name != "content-length"}
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line for line in answer.text.split("\n\n") if line]
        first = _normal_event(events[0])
        # A slow reader may get every token in the first chunk; then that one closes the choice and is signed.
        first.pop("system_fingerprint", None)
        first.pop("choices")
        return RawReply(answer.status_code, headers, {"first": first, "last": _normal_event(events[-1])})
    return RawReply(answer.status_code, headers, without_ids_and_times(answer.json()) if answer.content else "")


def _normal_event(event: str) -> Any:
    data = event.removeprefix("data: ")
    return without_ids_and_times(json.loads(data)) if data.startswith("{") else event
