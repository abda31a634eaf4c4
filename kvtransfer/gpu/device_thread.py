"""The thread that drives a GPU: it puts work into streams, and calls back when the device has done it.

It waits by asking, at growing intervals, only while something is under way; otherwise it sleeps until it is called.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.gpu.device import Event

log = logging.getLogger("twinpool.kvtransfer")

_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3

Call = Callable[[], None]


class Usable(Protocol):
    def use(self) -> None:
        """Make this the calling thread's device."""


@dataclass(frozen=True)
class _Awaited:
    event: Event
    then: Callable[[str], None]
    deadline_s: float
    failing: Callable[[], str]


class DeviceThread:
    """`post` may be called by any thread, `when_done` and `at` only by this one, that is from posted calls.

    An error in a call, or from the device, ends the thread: `error` holds it, and `on_error` is called.
    """

    def __init__(self, name: str, device: Usable, on_error: Call) -> None:
        self.error: BaseException | None = None
        self._device = device
        self._on_error = on_error
        # Not a SimpleQueue: CPython's, when preempted at the wrong moment, counts a short timeout below 0 and then
        # waits for ever.
        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._awaited: list[_Awaited] = []
        self._timers: list[tuple[float, Call]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Call) -> None:
        """Have it called, in the order of the posts."""
        self._calls.put(call)

    def when_done(
        self, event: Event, then: Callable[[str], None], within_s: float, failing: Callable[[], str] = lambda: ""
    ) -> None:
        """Call `then("")` once the device has come to `event`, or `then(reason)` when it has not in time or because
        `failing`, asked again and again meanwhile, gave a reason. The event may still come after that.
        """
        self._awaited.append(_Awaited(event, then, time.monotonic() + within_s, failing))

    def at(self, when_s: float, call: Call) -> None:
        """Call it at that time, monotonic."""
        self._timers.append((when_s, call))

    def close(self, timeout_s: float) -> bool:
        """After what was posted; what the device is still doing is not waited for. False when that takes longer."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._device.use()
            pause_s = _FIRST_PAUSE_S
            while True:
                try:
                    call = self._calls.get(timeout=self._timeout_s(pause_s))
                except queue.Empty:
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                else:
                    if call is None:
                        return
                    call()
                    pause_s = _FIRST_PAUSE_S
                if self._advance(time.monotonic()):
                    pause_s = _FIRST_PAUSE_S
        except BaseException as error:
            log.exception("device_thread_died")
            self.error = error
            self._on_error()

    def _timeout_s(self, pause_s: float) -> float | None:
        if self._awaited:
            return pause_s
        if self._timers:
            return max(0.0, min(when_s for when_s, _ in self._timers) - time.monotonic())
        return None

    def _advance(self, now_s: float) -> bool:
        """Call what is due, in the order in which it was asked for; True when there was anything."""
        awaited, self._awaited = self._awaited, []
        due: list[Call] = []
        for waiting in awaited:
            if waiting.event.done:
                due.append(lambda then=waiting.then: then(""))  # type: ignore[misc]
            elif reason := waiting.failing():
                due.append(lambda then=waiting.then, reason=reason: then(reason))  # type: ignore[misc]
            elif now_s >= waiting.deadline_s:
                due.append(lambda then=waiting.then: then("the device did not finish it in time"))  # type: ignore[misc]
            else:
                self._awaited.append(waiting)
        due += [call for when_s, call in self._timers if when_s <= now_s]
        self._timers = [(when_s, call) for when_s, call in self._timers if when_s > now_s]
        for call in due:
            call()
        return bool(due)
