"""Calls of a method of workers' engines, and their answers."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from cluster import messages
from proxy.workers.roster import Loss, Worker

log = logging.getLogger("twinpool.proxy")

UTILITY_TIMEOUT_S = 60.0


class UtilityError(Exception):
    """A worker could not carry out an engine call, or did not answer in time."""


class EngineCalls:
    """Used on the proxy's event loop. `send(worker_id, message)` says whether something is connected there."""

    def __init__(self, send: Callable[[str, messages.Utility], bool]) -> None:
        self._send = send
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._next_id = 1

    async def each(
        self, workers: Iterable[Worker], method: str, args: Sequence[Any], timeout_s: float = UTILITY_TIMEOUT_S
    ) -> dict[str, Any]:
        """By worker id: what its engine answered, or the `UtilityError` that tells why it did not.

        Raises `UtilityError` for a call that no worker may be asked for.
        """
        if method not in messages.ALLOWED_UTILITIES:
            raise UtilityError(f"the engine call {method} is not available on a cluster of workers")
        try:
            packed = msgspec.Raw(msgspec.msgpack.encode(args))
        except TypeError as error:
            raise UtilityError(f"the arguments of {method} cannot be sent to workers: {error}") from error
        waits = {worker.worker_id: self._ask(worker.worker_id, method, packed) for worker in workers}
        if not waits:
            return {}
        try:
            _, late = await asyncio.wait(waits.values(), timeout=timeout_s)
        finally:
            # Also when the caller is cancelled: nobody waits for these any more.
            for future in waits.values():
                future.cancel()
        return {
            worker_id: UtilityError(f"worker {worker_id} did not answer {method} within {timeout_s:g} s; see its log")
            if future in late
            else future.exception() or future.result()
            for worker_id, future in waits.items()
        }

    def _ask(self, worker_id: str, method: str, packed: msgspec.Raw) -> "asyncio.Future[Any]":
        call_id, self._next_id = self._next_id, self._next_id + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (worker_id, future)
        future.add_done_callback(partial(self._done, call_id))
        if not self._send(worker_id, messages.Utility(call_id, method, packed)):
            future.set_exception(UtilityError(f"worker {worker_id} is not reachable"))
        return future

    def _done(self, call_id: int, _: "asyncio.Future[Any]") -> None:
        self._waiting.pop(call_id, None)

    def reply(self, worker: Worker, reply: messages.UtilityReply) -> None:
        """A worker answers."""
        worker_id, future = self._waiting.get(reply.call_id, ("", None))
        if future is None or future.done() or worker_id != worker.worker_id:
            return
        if reply.error:
            future.set_exception(UtilityError(f"worker {worker_id}: {reply.error}"))
            return
        try:
            future.set_result(msgspec.msgpack.decode(reply.result))
        except (msgspec.DecodeError, RecursionError) as error:
            future.set_exception(UtilityError(f"worker {worker_id} answered with malformed data: {error}"))

    def lost(self, loss: Loss) -> None:
        """A worker will not answer any more."""
        for worker_id, future in list(self._waiting.values()):
            if worker_id == loss.worker_id and not future.done():
                future.set_exception(UtilityError(loss.cause))


def results_of_all(answers: dict[str, Any], method: str) -> dict[str, Any]:
    """The answers, if every worker gave one; raises `UtilityError` naming those that did not."""
    if not answers:
        raise UtilityError(f"no worker is alive to carry out {method}")
    errors = [str(answer) for answer in answers.values() if isinstance(answer, UtilityError)]
    if errors:
        raise UtilityError("; ".join(errors))
    return answers
