"""How commands speak to a cluster that serves: its status, and orders about its workers."""

import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Annotated, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console

from cluster.orders import Accepted, CloseOrder, DrainOrder, Refusal, RestartOrder, RoleOrder, ScaleOrder
from cluster.status import ClusterStatus

_TIMEOUT_S = 5.0

Url = Annotated[str, typer.Option(help="Where the cluster serves.")]
ApiKey = Annotated[str, typer.Option(envvar="TWINPOOL_API_KEY", help="If the cluster wants one.")]
DEFAULT_URL = "http://127.0.0.1:8000"

Answer = TypeVar("Answer", bound=msgspec.Struct)


class CallFailed(Exception):
    """No answer, or a refusal; a sentence for the operator."""


def fetch_status(url: str, api_key: str) -> tuple[bytes, ClusterStatus]:
    """The status as it came and as it reads; raises `CallFailed`."""
    endpoint = f"{url.rstrip('/')}/twinpool/status"
    body = _call(endpoint, api_key, "status", None)
    try:
        return body, msgspec.json.decode(body, type=ClusterStatus)
    except msgspec.DecodeError as error:
        raise CallFailed(_nobody(endpoint, "status", str(error))) from error


Order = DrainOrder | RoleOrder | RestartOrder | ScaleOrder | CloseOrder


def give_order(url: str, api_key: str, path: str, order: Order) -> Accepted:
    """What the cluster will do; raises `CallFailed`, also if it refuses. `path` begins with a slash."""
    return call(f"{url.rstrip('/')}{path}", api_key, Accepted, "POST", msgspec.json.encode(order))


def call(endpoint: str, api_key: str, answer: type[Answer], method: str = "GET", body: bytes | None = None) -> Answer:
    """What an address answers, typed; raises `CallFailed`, also if it refuses."""
    text = _call(endpoint, api_key, "answer", body, method)
    try:
        return msgspec.json.decode(text, type=answer)
    except msgspec.DecodeError as error:
        raise CallFailed(_nobody(endpoint, "answer", str(error))) from error


def _call(endpoint: str, api_key: str, what: str, body: bytes | None, method: str | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(endpoint, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        with error:
            raise CallFailed(_refusal(endpoint, error)) from error
    except (OSError, ValueError, HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise CallFailed(_nobody(endpoint, what, reason)) from error


def _refusal(endpoint: str, error: urllib.error.HTTPError) -> str:
    try:
        return msgspec.json.decode(error.read(), type=Refusal).error.message
    except (msgspec.DecodeError, OSError, HTTPException):
        return f"{endpoint} answered {error.code} {error.reason}. Is it a twinpool, and is the --api-key right?"


def _nobody(endpoint: str, what: str, reason: str) -> str:
    return f"no {what} from {endpoint}: {reason}. Is a cluster serving there? Name another address with --url."


def fail(text: str, code: int) -> NoReturn:
    """Ends the command with a sentence on standard error."""
    Console(stderr=True).print(f"twinpool: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
