"""The core client of a further API server process: the cluster behind a socket.

Relies on vLLM 0.32: what `proxy.frontend.vllm_core_client` does, `MsgpackEncoder`, and `OutputProcessor.request_states`
for the requests that are open.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import zmq
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from proxy.adapters.adapter import Adapter
from proxy.adapters.registry import LOAD_TIMEOUT_S
from proxy.api_servers import messages
from proxy.api_servers.control import NO_ANSWER
from proxy.api_servers.link import DispatcherLink
from proxy.frontend.vllm_core_client import FrontEndClient
from proxy.legs.vllm_leg_outputs import BadOutputs, OutputDecoder
from proxy.scheduling.view import RequestShape
from proxy.workers.engine_calls import UTILITY_TIMEOUT_S

log = logging.getLogger("twinpool.api_server")


class RemoteClient(FrontEndClient):
    """Sends requests to the dispatcher and gets back what becomes of them."""

    def __init__(self, link: DispatcherLink, welcome: messages.Welcome, returns_routed_experts: bool = False) -> None:
        super().__init__(welcome.num_engines, returns_routed_experts)
        self._link = link
        self._welcome = welcome
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._encoder = MsgpackEncoder()
        self._decoder = OutputDecoder()
        link.on_outputs, link.on_failed = self._take_outputs, self._take_failure
        link.on_adapters = self._show_adapters
        self._show_adapters(link.adapters)

    @property
    def _outputs(self) -> "asyncio.Queue[Any]":
        return self._queue

    def _submit(self, request: EngineCoreRequest, shape: RequestShape, group: str, choices: int) -> None:
        add = messages.Add(request.request_id, shape.standing, group, choices)
        self._link.send(add, self._encoder.encode(request))

    def _abort(self, request_ids: Iterable[str], *, answered: bool = False) -> None:
        if ids := list(request_ids):
            self._link.send(messages.Abort(ids, answered))

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        reply = await self._link.call(method, args, UTILITY_TIMEOUT_S)
        error = NO_ANSWER if reply is None else reply.error
        if reply is None or error:
            raise GracefulHTTPError(error, HTTPStatus.SERVICE_UNAVAILABLE)
        results: list[Any] = msgspec.msgpack.decode(reply.results)
        return results

    async def _load_adapter(self, adapter: Adapter, *, again: bool) -> Adapter:
        reply = await self._link.load_adapter(adapter, again, LOAD_TIMEOUT_S)
        error = NO_ANSWER if reply is None else reply.error
        if reply is None or error:
            raise GracefulHTTPError(error, HTTPStatus.SERVICE_UNAVAILABLE)
        return reply.adapter

    def end_all(self, status: int, message: str) -> None:
        open_ids = list(self._front_end.request_states) if self._front_end is not None else []
        self._abort(open_ids)
        for request_id in open_ids:
            self.tell_client(request_id, status, message)

    def dp_engines_running(self) -> bool:
        """Whether a request of this process is in the cluster."""
        return self._front_end is not None and bool(self._front_end.request_states)

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """What every worker supported when this process started."""
        return tuple(self._welcome.engine.supported_tasks)

    def _take_outputs(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            step = self._decoder.decode(frames)
        except BadOutputs as error:
            self._link.bad_frames += 1
            log.warning("bad_outputs error=%s", error)
            return
        prefix = self._welcome.prefix
        for output in step.outputs:
            output.request_id = output.request_id.removeprefix(prefix)
        self._queue.put_nowait(step)

    def _take_failure(self, request_id: str, status: int, message: str, retry_after_s: float | None) -> None:
        ended = self.tell_client(request_id, status, message, retry_after_s)
        # The dispatcher has ended what it knew of the siblings, but not if it could not read this one.
        self._abort(sibling for sibling in ended if sibling != request_id)
