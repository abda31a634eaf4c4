"""Reads the body of a request whole, before the application does."""

import asyncio

from starlette.types import Message, Receive, Scope

BODY_PIECE_WITHIN_S = 60.0
"""A client that sends nothing of its body for so long is given up."""


class BodyTooLarge(Exception):
    """The body is longer than allowed."""


class BodyStalled(Exception):
    """Nothing more of the body came in time; a sentence for the client."""

    def __init__(self) -> None:
        super().__init__(f"Nothing more of the body came for {BODY_PIECE_WITHIN_S:g} s; send the request again")


class ClientLeft(Exception):
    """The client has closed its connection."""


async def read_body(scope: Scope, receive: Receive, limit: int | None = None) -> bytes:
    """The whole body, of at most `limit` bytes.

    Raises `BodyTooLarge` (before reading, if a length is given), `BodyStalled` or `ClientLeft`.
    """
    for name, value in scope.get("headers", ()):
        if limit is not None and name == b"content-length" and value.isdigit() and int(value) > limit:
            raise BodyTooLarge
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_PIECE_WITHIN_S):
                message = await receive()
        except TimeoutError:
            raise BodyStalled from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if limit is not None and size > limit:
            raise BodyTooLarge
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Gives the application the body that was read already, and then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
