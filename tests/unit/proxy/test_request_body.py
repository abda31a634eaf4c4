"""A body is read whole or not at all, and never waited for without end."""

import asyncio

import pytest
from starlette.types import Message, Receive

from proxy.middleware import request_body
from proxy.middleware.request_body import BodyStalled, BodyTooLarge, ClientLeft, read_body, replaying

LEFT: Message = {"type": "http.disconnect"}


def piece(body: bytes, *, last: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": not last}


def coming(*messages: Message) -> Receive:
    queue = list(messages)

    async def receive() -> Message:
        if not queue:
            await asyncio.Event().wait()
        return queue.pop(0)

    return receive


async def test_pieces_make_a_whole() -> None:
    assert await read_body({}, coming(piece(b"a"), piece(b"b"), piece(b"c", last=True))) == b"abc"


async def test_a_client_that_leaves_in_the_middle_has_sent_no_body() -> None:
    with pytest.raises(ClientLeft):
        await read_body({}, coming(piece(b"a"), LEFT))


async def test_a_body_that_is_longer_than_allowed_is_given_up() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body({}, coming(piece(b"ab"), piece(b"cd")), 3)


async def test_a_length_that_is_larger_than_allowed_is_enough() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body({"headers": [(b"content-length", b"4")]}, coming(), 3)


async def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_PIECE_WITHIN_S", 0.01)
    with pytest.raises(BodyStalled, match=r"Nothing more of the body came for 0\.01 s; send the request again"):
        await read_body({}, coming(piece(b"a")))


async def test_what_was_read_is_there_once_more_and_then_comes_the_departure() -> None:
    receive = replaying(b"ab", coming(LEFT))
    assert [await receive(), await receive()] == [piece(b"ab", last=True), LEFT]
