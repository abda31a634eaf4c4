"""The status line goes out with the first event, and an error is an error."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Message

from proxy.middleware.request_context import CURRENT
from proxy.middleware.status_line import StatusLine

ERROR = b'data: {"error": {"message": "Worker decode-0 left", "type": "Service Unavailable", "code": 503}}\n\n'


class Graceful(Exception):
    def __init__(self) -> None:
        super().__init__("gone")
        self.message, self.http_status = "Worker decode-0 left", 503


async def answer(
    *bodies: bytes,
    content_type: str = "text/event-stream; charset=utf-8",
    fails: Exception | None = None,
    status: int = 200,
    retry_after_s: float | None = None,
    more_headers: Sequence[tuple[bytes, bytes]] = (),
) -> list[Message]:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        context = CURRENT.get()
        assert context is not None
        context.retry_after_s = retry_after_s
        headers = [(b"content-type", content_type.encode()), (b"x-request-id", b"7"), *more_headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if fails is not None:
            raise fails
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    await StatusLine(app)({"type": "http", "path": "/v1/completions", "headers": []}, receive, send)
    return sent


def bodies(sent: list[Message]) -> bytes:
    return b"".join(message["body"] for message in sent if message["type"] == "http.response.body")


def assert_complete(sent: list[Message]) -> None:
    assert [m["type"] for m in sent].count("http.response.start") == 1
    assert sent[0]["type"] == "http.response.start"
    assert sent[-1].get("more_body") is False


async def test_a_stream_that_goes_well_is_passed_on_unbuffered() -> None:
    sent = await answer(b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n")
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == 200
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-request-id"] == b"7"
    assert [m["body"] for m in sent[1:4]] == [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]
    assert_complete(sent)


async def test_an_error_before_anything_else_is_the_status() -> None:
    sent = await answer(ERROR, b"data: [DONE]\n\n")
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == 503
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(bodies(sent))
    assert json.loads(bodies(sent))["error"]["message"] == "Worker decode-0 left"
    assert_complete(sent)


async def test_an_error_in_mid_stream_is_the_last_event() -> None:
    sent = await answer(b"data: one\n\n", ERROR, b"data: [DONE]\n\n")
    assert bodies(sent) == b"data: one\n\n" + ERROR
    assert_complete(sent)


async def test_an_error_and_done_in_one_chunk_lose_the_done() -> None:
    sent = await answer(b"data: one\n\n", ERROR + b"data: [DONE]\n\n")
    assert bodies(sent) == b"data: one\n\n" + ERROR


async def test_a_stream_whose_maker_fails_ends_with_an_error_event() -> None:
    try:
        raise RuntimeError("response already started") from Graceful()
    except RuntimeError as error:
        sent = await answer(b"event: response.created\ndata: {}\n\n", fails=error)
    event = bodies(sent).split(b"\n\n")[1]
    assert event.startswith(b"event: error\ndata: ")
    data = json.loads(event.split(b"data: ")[1])
    assert data["type"] == "error"
    assert data["error"]["message"] == "Worker decode-0 left"
    assert data["error"]["code"] == 503
    assert_complete(sent)


async def test_a_stream_whose_maker_fails_before_the_first_event_is_an_error_reply() -> None:
    sent = await answer(fails=Graceful())
    assert sent[0]["status"] == 503
    assert json.loads(bodies(sent))["error"]["type"] == "Service Unavailable"
    assert_complete(sent)


async def test_an_unknown_failure_tells_the_client_nothing_about_the_inside() -> None:
    sent = await answer(fails=ValueError("secret"))
    assert sent[0]["status"] == 500
    assert b"secret" not in bodies(sent)


async def test_other_responses_are_not_touched() -> None:
    sent = await answer(b'{"error": 1}', content_type="application/json")
    assert sent[0]["status"] == 200
    assert b"cache-control" not in dict(sent[0]["headers"])
    with pytest.raises(ValueError, match="boom"):
        await answer(content_type="application/json", fails=ValueError("boom"))


async def test_an_empty_stream_still_gets_its_status_line() -> None:
    sent = await answer()
    assert sent[0]["status"] == 200
    assert_complete(sent)


async def test_a_keep_alive_comment_commits_to_the_status() -> None:
    sent = await answer(b": ping\n\n", ERROR)
    assert sent[0]["status"] == 200
    assert bodies(sent) == b": ping\n\n" + ERROR


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("after_s", "told"), [(None, b"1"), (0.02, b"1"), (2.1, b"3"), (float("inf"), b"600")])
async def test_a_reply_that_says_later_says_when(stream: bool, after_s: float | None, told: bytes) -> None:
    if stream:
        sent = await answer(ERROR, retry_after_s=after_s)
    else:
        sent = await answer(b"{}", content_type="application/json", status=503, retry_after_s=after_s)
    assert [value for name, value in sent[0]["headers"] if name == b"retry-after"] == [told]


async def test_nothing_is_added_to_other_replies_or_to_what_is_said_already() -> None:
    for status in (200, 400, 500):
        sent = await answer(b"{}", content_type="application/json", status=status, retry_after_s=2)
        assert b"retry-after" not in dict(sent[0]["headers"])
    sent = await answer(b"{}", content_type="a/b", status=429, more_headers=[(b"Retry-After", b"9")])
    assert [name for name, _ in sent[0]["headers"]].count(b"Retry-After") == 1
    assert b"retry-after" not in dict(sent[0]["headers"])
