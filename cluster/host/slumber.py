"""Puts an engine to sleep when nothing uses its KV cache any more, and wakes it.

An engine that sleeps has its weights in the memory of the host, and its KV cache has no memory at all: whoever read or
wrote there would end the process. So it falls asleep only when no request and no transfer of any rank is open, and
nothing but waking is asked of it until it is awake. Its host goes on: it tells the proxy that it lives, and notices the
engine's death.

Memory comes back at the addresses that it had, and no other process has opened any of it: CUDA IPC cannot share the
memory of an engine that can sleep. So ranks and their connections need not notice. What the cache held is gone, which
the proxy is told.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from cluster.host.drain import SETTLE_S, Carried
from cluster.messages import ALLOWED_UTILITIES, Utility, UtilityReply

log = logging.getLogger("twinpool.worker")

WITHIN_S = 15.0
"""So long something may still be open when it is told to sleep; the proxy has waited for its requests before."""
LEVEL = 1
"""vLLM's: weights to the host's memory. 0 keeps everything on the device, 2 throws the weights away."""
_LOOK_AGAIN_S = 0.1
_CALLS = ("sleep", "wake_up")

CallEngine = Callable[[str, list[Any]], Awaitable[Any]]


class Unable(Exception):
    """The engine was not put to sleep, or not woken; a sentence."""


class Slumber:
    """Of one engine.

    Args:
        worker_id: for the log.
        carried: what the worker has.
        call_engine: a call of the engine core, `sleep` or `wake_up`.
        reply: tells the proxy.
        on_asleep: what the cache held is gone.
    """

    def __init__(
        self,
        worker_id: str,
        carried: Callable[[], Carried],
        call_engine: CallEngine,
        reply: Callable[[UtilityReply], None],
        on_asleep: Callable[[], None],
    ) -> None:
        self._worker_id = worker_id
        self._carried = carried
        self._call_engine = call_engine
        self._reply = reply
        self._on_asleep = on_asleep
        self._calls: asyncio.Queue[Utility] = asyncio.Queue()
        self.asleep = False
        """The engine sleeps, or is on its way there or back, or did not come back: it takes no requests."""

    def takes(self, call: Utility) -> bool:
        """Whether this is its affair: sleeping, and everything else while the engine sleeps."""
        if call.method in _CALLS:
            self._calls.put_nowait(call)
            return True
        if call.method == "is_sleeping":
            self._answer(call, "", self.asleep)
            return True
        if self.asleep and call.method in ALLOWED_UTILITIES:
            self._answer(call, f"{call.method} is not possible: the engine is asleep", None)
            return True
        return False

    async def run(self) -> None:
        """Carries out what was taken, one after another, beside whoever reads the proxy's messages."""
        while True:
            call = await self._calls.get()
            began_s = time.monotonic()
            try:
                result = await (self._sleep(call) if call.method == "sleep" else self._wake())
            except Unable as error:
                self._answer(call, str(error), None)
            except Exception as error:  # noqa: BLE001 - what the engine reports belongs to the caller
                self._answer(call, f"{type(error).__name__}: {error}", None)
            else:
                log.info("%s worker=%s s=%.2f", call.method, self._worker_id, time.monotonic() - began_s)
                self._answer(call, "", result)

    async def _sleep(self, call: Utility) -> None:
        if self.asleep:
            return
        try:
            level, *_ = msgspec.msgpack.decode(call.args, type=list[Any])
        except (msgspec.DecodeError, ValueError) as error:
            raise Unable(f"the arguments of sleep cannot be read: {error}") from error
        if level != LEVEL:
            raise Unable(f"level {level} is not possible here, only {LEVEL}: weights are kept, blocks are not")
        await self._until_nothing_is_open()
        self.asleep = True  # also if what follows fails: then nobody knows what the engine has
        await self._call_engine("sleep", [LEVEL, "abort"])
        self._on_asleep()

    async def _wake(self) -> bool:
        if self.asleep:
            if await self._call_engine("wake_up", [None]) is not True:
                raise Unable("the engine did not get all of its memory back")
            self.asleep = False
        return True

    async def _until_nothing_is_open(self) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            carried, now_s = self._carried(), time.monotonic()
            is_empty = carried.num_requests == carried.transfers_open == 0
            # Ranks count their transfers once a second.
            if is_empty and now_s - carried.last_work_s >= SETTLE_S:
                return
            if now_s >= deadline_s:
                raise Unable(f"it still has {carried.num_requests} requests and {carried.transfers_open} transfers")
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _answer(self, call: Utility, error: str, result: Any) -> None:
        self._reply(UtilityReply(call.call_id, error, msgspec.Raw(msgspec.msgpack.encode(result))))
