"""One further API server process, as the dispatcher sees it.

Relies on vLLM 0.32: `EngineCoreRequest`, `EngineCoreOutputs.scheduler_stats`, `MsgpackEncoder`, `MsgpackDecoder`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import zmq
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from proxy.api_servers import messages
from proxy.api_servers.arrivals import Arrivals


class BadRequest(Exception):
    """Frames that are no `EngineCoreRequest`."""


class RequestDecoder:
    """Decodes the frames that follow `messages.Add`."""

    def __init__(self) -> None:
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def decode(self, frames: Sequence[zmq.Frame]) -> EngineCoreRequest:
        """Raises `BadRequest` whatever is wrong with the frames."""
        if not frames:
            raise BadRequest("no frames")
        try:
            return cast(EngineCoreRequest, self._decoder.decode(frames))
        except Exception as error:
            raise BadRequest(f"{type(error).__name__}: {error}") from error


@dataclass(eq=False, slots=True)
class RemoteFrontEnd:
    """One life of one process; a `proxy.trips.front_end.FrontEnd`."""

    name: str
    pid: int
    identity: bytes
    prefix: str
    """Of its requests' ids in the dispatcher."""
    heard_s: float
    encoder: MsgpackEncoder
    send: "Callable[[RemoteFrontEnd, messages.ToApiServer, Sequence[Any]], None]"
    ready: bool = False
    arrivals: Arrivals = field(default_factory=Arrivals)
    adapters_version: int = 0
    """Of the list of adapters that it has last said it knows."""

    def take(self, outputs: Any) -> None:
        # The engine's statistics are shown by the API server beside the dispatcher, once.
        outputs.scheduler_stats = None
        self.send(self, messages.Outputs(), self.encoder.encode(outputs))

    def fail(self, request_id: str, status: int, message: str, retry_after_s: float | None) -> None:
        own_id = request_id.removeprefix(self.prefix)
        self.arrivals.failed(own_id)
        self.send(self, messages.Failed(own_id, status, message, retry_after_s), ())
