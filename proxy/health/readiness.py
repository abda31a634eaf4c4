"""Ready means: a real generation went through a prefill and a decode worker a short while ago.

Clients' requests show it. When there were none, one of the proxy's own does; however many ask, there is one at a time,
and it has a deadline.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("twinpool.proxy")

PROBE_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 1.0
"""The decode worker's report of the hand-over may come after its tokens."""
REPORT_POLL_S = 0.05


class Readiness:
    """Asked by `/ready`.

    Args:
        within_s: how long ago the generation may be.
        last_at_s: when the last one was, on the monotonic clock; None: never.
        probe: makes one, and raises whatever went wrong.
        obstacle: a sentence if it cannot work now, whoever tries; else empty.
    """

    def __init__(
        self,
        within_s: float,
        last_at_s: Callable[[], float | None],
        probe: Callable[[], Awaitable[None]],
        obstacle: Callable[[], str],
    ) -> None:
        self._within_s = within_s
        self._last_at_s = last_at_s
        self._probe = probe
        self._obstacle = obstacle
        self._probing: asyncio.Task[str] | None = None

    async def reason(self) -> str:
        """Why it is not ready; empty if it is."""
        if obstacle := self._obstacle():
            return obstacle
        if self._since(time.monotonic() - self._within_s):
            return ""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._try(), name="readiness-probe")
        # Whoever asked may leave; the others still wait for it.
        return await asyncio.shield(self._probing)

    def close(self) -> None:
        """Ends a probe that is under way."""
        if self._probing is not None:
            self._probing.cancel()

    def _since(self, start_s: float) -> bool:
        last_s = self._last_at_s()
        return last_s is not None and last_s >= start_s

    async def _try(self) -> str:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._probe()
        except TimeoutError:
            return f"a test request got no answer within {PROBE_TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            log.warning("readiness_probe_failed error=%s", error)
            return f"a test request failed: {error}"
        deadline_s = time.monotonic() + REPORT_TIMEOUT_S
        while not self._since(started_s):
            if time.monotonic() > deadline_s:
                return "a test request was answered, but did not go through a prefill and a decode worker"
            await asyncio.sleep(REPORT_POLL_S)
        return ""
