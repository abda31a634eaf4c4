"""Ctrl-C, SIGTERM and the end of the terminal, also while the event loop is busy and cannot be interrupted."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

# The loop normally reacts within a millisecond; an import of vLLM or a tokenizer can keep it for many seconds.
_REACTION_S = 1.5
# What may come on top of the workers' own time to stop.
_MARGIN_S = 15.0
_FORCED_GRACE_S = 2.0


class Interruption:
    """Sets `stop` on the first signal. If nothing comes of it, or a second signal comes, forces the end.

    `stop_now(grace_s)` must end every process that was started, without the event loop. Make it inside the running
    loop, in the main thread.
    """

    def __init__(self, stop: asyncio.Event, stop_now: Callable[[float], None], stop_timeout_s: float) -> None:
        self.signal_number = 0
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._stop_now = stop_now
        self._stop_timeout_s = stop_timeout_s
        self._reacted = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Who started it with `nohup` wants it to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def noticed(self) -> None:
        """The event loop is alive and about to take everything apart."""
        self._reacted.set()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_number:
            self._force(0.0)
        self.signal_number = number
        self._loop.call_soon_threadsafe(self._stop.set)
        threading.Thread(target=self._force_if_stuck, name="interruption", daemon=True).start()

    def _force_if_stuck(self) -> None:
        if self._reacted.wait(_REACTION_S):
            threading.Event().wait(self._stop_timeout_s + _MARGIN_S)
        self._force(_FORCED_GRACE_S)

    def _force(self, grace_s: float) -> None:
        self._stop_now(grace_s)
        os._exit(128 + self.signal_number)
