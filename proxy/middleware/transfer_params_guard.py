"""Refuses the proxy's own fields when clients set them, before vLLM looks at the request.

`kv_transfer_params` say which memory of which worker is read, `twinpool` how urgent a request is to an engine, so only
the proxy may set them. vLLM takes them from several places in a body, starts streams before it validates them, and
fails with a 500 where transfer parameters are no object; so they are refused here.
`legs.vllm_leg_requests.describe` is the second line: it sees what no spelling can hide.
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.middleware.error_reply import CLOSE, send_error
from proxy.middleware.request_body import BodyStalled, ClientLeft, read_body, replaying

FIELDS = ("kv_transfer_params", "twinpool")


class TransferParamsGuard:
    """A pure ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive)
        except ClientLeft:
            return
        except BodyStalled as error:
            await send_error(scope, send, 408, str(error), None, [CLOSE])
            return
        field = field_of_ours(body)
        if field is not None:
            refusal = (
                f"{field} is set by the proxy for its own legs and is not accepted from clients; remove the field "
                f"from the request (parameter={field})"
            )
            await send_error(scope, send, 400, refusal, field)
            return
        await self._app(scope, replaying(body, receive), send)


def field_of_ours(body: bytes) -> str | None:
    """The first of `FIELDS` that a body sets anywhere vLLM would read it. A text that mentions it is no such body."""
    if not any(field.encode() in body for field in FIELDS):
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the latter with arrays nested some thousand deep
        return None  # vLLM answers what it answers to such a body
    if not isinstance(request, Mapping):
        return None
    sampling_params = _part(request, "sampling_params")
    places = (request, _part(request, "vllm_xargs"), sampling_params, _part(sampling_params, "extra_args"))
    return next((field for field in FIELDS if any(place.get(field) is not None for place in places)), None)


def _part(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = request.get(name)
    return part if isinstance(part, Mapping) else {}
