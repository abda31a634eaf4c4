"""Passes one request on to a model's cluster, and its reply back, as they come.

Nothing of a reply is kept: what the cluster sends is sent to the client at once, and a client that reads slowly slows
the cluster down. When the client leaves, the connection to the cluster closes, which ends its request there. When the
cluster breaks off, an event stream ends with an error event, and any other reply with a connection that breaks off.
"""

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from proxy.middleware.error_reply import envelope, error_event, send_error

log = logging.getLogger("twinpool.models")

RETRY_AFTER = ((b"retry-after", b"1"),)
_OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade", "expect"),
}
"""Headers that are for the next hop only. `expect` was answered when the body was read."""
_EVENT_NAMED = ("/v1/responses", "/v1/messages")
"""APIs whose streams name their events."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request that was passed on has ended."""

    status: int
    """Of the reply."""
    broken: bool = False
    """The cluster broke off in the middle of it."""


async def until_client_leaves(receive: Receive) -> None:
    """Returns when the connection is closed; to be called after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def pass_on(session: aiohttp.ClientSession, scope: Scope, path: str, body: bytes, send: Send) -> Ended:
    """Sends a request to a cluster and its reply to the client.

    `path` is percent-encoded, without the query. Returns when the reply has ended, in whatever way.
    """
    query = scope.get("query_string", b"").decode("latin-1")
    url = URL(f"http://model{path}{'?' if query else ''}{query}", encoded=True)
    method = str(scope["method"])
    headers = _request_headers(scope["headers"])
    if session.closed:  # its process has just ended
        return await _no_reply(scope, send, path, None)
    try:
        response = await session.request(method, url, headers=headers, data=body or None, allow_redirects=False)
    except (aiohttp.ClientError, OSError) as error:
        return await _no_reply(scope, send, path, error)
    async with response:
        await send({"type": "http.response.start", "status": response.status, "headers": _reply_headers(response)})
        try:
            last = b""
            async for chunk in response.content.iter_any():
                last = chunk
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (aiohttp.ClientError, OSError) as error:
            log.warning("reply_broken_off path=%s error=%s", path, error or type(error).__name__)
            if response.content_type == "text/event-stream":
                event = _error_event(path, 502, "The model's cluster ended while it answered")
                separator = b"" if not last or last.endswith(b"\n\n") else b"\n\n"
                await send({"type": "http.response.body", "body": separator + event, "more_body": False})
            # Without the last piece, the server closes the connection: the client sees that the reply is not complete.
            return Ended(response.status, broken=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    return Ended(response.status)


async def _no_reply(scope: Scope, send: Send, path: str, error: BaseException | None) -> Ended:
    """Nothing was sent yet, so the client gets an error of its own kind. `error` is None if nothing was tried."""
    log.warning("no_reply path=%s error=%s", path, str(error) or type(error).__name__)
    if error is None or isinstance(error, aiohttp.ClientConnectorError):
        await send_error(scope, send, 503, "The model's cluster does not accept requests", None, RETRY_AFTER)
        return Ended(503, broken=True)
    await send_error(scope, send, 502, "The model's cluster ended before it answered")
    return Ended(502, broken=True)


def _request_headers(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """What goes on to the cluster; the length is that of the body, which is sent in one piece."""
    given = [(name.decode("latin-1").lower(), _as_sent(value)) for name, value in headers]
    dropped = _dropped(given) | {"content-length"}
    return CIMultiDict((name, value) for name, value in given if name not in dropped)


def _as_sent(value: bytes) -> str:
    """What aiohttp, which writes UTF-8, sends as these bytes. Bytes of other encodings become those of UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _reply_headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    given = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.raw_headers]
    dropped = _dropped(given)
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given if name not in dropped]


def _dropped(headers: Iterable[tuple[str, str]]) -> set[str]:
    named = [value for name, value in headers if name == "connection"]
    return _OF_A_CONNECTION | {token.strip().lower() for value in named for token in value.split(",")}


def _error_event(path: str, status: int, message: str) -> bytes:
    error = envelope(status, message)
    if not path.endswith(_EVENT_NAMED):
        return b"data: " + json.dumps(error).encode() + b"\n\n"
    return error_event(error)


class Sending:
    """Passes messages to the client, and knows when the reply is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_over = False

    async def __call__(self, message: Message) -> None:
        self.is_over = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)


async def carried_out(work: "asyncio.Task[None]", receive: Receive, sending: Sending) -> bool:
    """Waits for a request to be carried out, and ends it when its client leaves before the end; False in that case.

    Raises what `work` raises.
    """
    leaving = asyncio.create_task(until_client_leaves(receive), name="client")
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        # The server says that the client has left also when the reply is complete.
        if work.done() or sending.is_over:
            await work
            return True
        return False
    finally:
        leaving.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
