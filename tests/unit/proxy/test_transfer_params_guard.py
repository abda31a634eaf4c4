"""Clients cannot steer a hand-over."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from proxy.middleware import request_body
from proxy.middleware.transfer_params_guard import FIELDS, TransferParamsGuard, field_of_ours

PARAMS = {"mode": "import"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "kv_transfer_params": PARAMS},
        {"prompt": "x", "kv_transfer_params": "text"},
        {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "text"}},
        {"token_ids": [1], "sampling_params": {"kv_transfer_params": PARAMS}},
        {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": PARAMS}}},
        {"prompt": "x", "vllm_xargs": {"twinpool": {"priority": -9}}},
        {"token_ids": [1], "sampling_params": {"extra_args": {"twinpool": {"ttft_left_s": 0}}}},
    ],
)
def test_the_field_is_found_wherever_vllm_reads_it(body: dict[str, Any]) -> None:
    assert field_of_ours(json.dumps(body).encode()) == next(f for f in FIELDS if f in json.dumps(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"kv_transfer_params",
        b'["kv_transfer_params"]',
        b'{"prompt": "what are kv_transfer_params?"}',
        b'{"prompt": "x", "kv_transfer_params": null}',
        b'{"prompt": "x", "vllm_xargs": "kv_transfer_params"}',
        b'{"kv_transfer_params": ' + b"[" * 100_000,
        b'{"tools": [{"function": {"parameters": {"properties": {"kv_transfer_params": {}}}}}]}',
    ],
)
def test_other_bodies_pass(body: bytes) -> None:
    assert field_of_ours(body) is None


async def through(
    chunks: list[bytes], path: str = "/v1/completions", method: str = "POST"
) -> tuple[Any, list[Message]]:
    """What the application received (None if it was not reached), and what was sent."""
    queue: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": at + 1 < len(chunks)} for at, chunk in enumerate(chunks)
    ]
    queue.append({"type": "http.disconnect"})
    seen: list[Message] = []
    sent: list[Message] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while True:
            seen.append(await receive())
            if seen[-1]["type"] == "http.disconnect":
                return

    async def receive() -> Message:
        return queue.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await TransferParamsGuard(app)({"type": "http", "method": method, "path": path}, receive, send)
    return seen, sent


async def test_a_body_in_pieces_is_passed_on_whole_and_then_the_departure() -> None:
    seen, sent = await through([b'{"prompt": ', b'"x"}'])
    assert [message.get("body") for message in seen] == [b'{"prompt": "x"}', None]
    assert sent == []


async def test_the_field_split_over_two_pieces_is_refused_with_400() -> None:
    seen, sent = await through([b'{"kv_transfer', b'_params": {"mode": "import"}}'])
    assert seen == []
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["param"] == "kv_transfer_params"


async def test_the_messages_route_is_refused_in_its_own_words() -> None:
    _, sent = await through([json.dumps({"kv_transfer_params": PARAMS}).encode()], "/v1/messages")
    assert json.loads(sent[1]["body"])["type"] == "error"


async def test_a_client_that_leaves_within_its_body_reaches_nobody() -> None:
    assert await through([]) == ([], [])


async def test_a_body_that_stops_coming_is_a_408_that_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_PIECE_WITHIN_S", 0.01)
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("it has no body to work on")

    await TransferParamsGuard(app)({"type": "http", "method": "POST", "path": "/v1/completions"}, receive, send)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == 408


async def test_other_methods_are_not_read() -> None:
    seen, _ = await through([b"kv_transfer_params"], method="GET")
    assert len(seen) == 2
