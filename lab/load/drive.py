"""Sends sessions at their times, whatever the server does, and collects what became of them."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import aiohttp

from lab.load.client import Record, Target, complete
from lab.load.plan import Session
from lab.load.prompts import Prompts

Done = Callable[[Record], None]


class Load:
    """One run. `records` grows while it goes on; requests that were cut off are in it too."""

    def __init__(
        self,
        targets: Sequence[Target],
        sessions: Sequence[Session],
        prompts: Prompts,
        on_done: Done,
        class_header: str = "",
    ) -> None:
        """Sessions go to `targets` round robin. `class_header`: header that names a request's class, or empty."""
        self.records: list[Record] = []
        self.num_sent = 0
        self._targets = targets
        self._sessions = sessions
        self._added = {session.number: [prompts.of(turn) for turn in session.turns] for session in sessions}
        self._on_done = on_done
        self._class_header = class_header
        self._started_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s if self._started_s else 0.0

    async def run(self) -> None:
        """Returns when every request has ended. Cancelling it cuts the open ones off."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            with _short_collections():
                self._started_s = time.perf_counter()
                async with asyncio.TaskGroup() as tasks:
                    for session in self._sessions:
                        await asyncio.sleep(max(0.0, session.start_s - self.elapsed_s))
                        tasks.create_task(self._talk(http, session))

    async def _talk(self, http: aiohttp.ClientSession, session: Session) -> None:
        """All turns of a session; the first that fails is the last."""
        prompt: list[int] = []
        planned_s = session.start_s
        target = self._targets[session.number % len(self._targets)]
        headers = {self._class_header: session.work} if self._class_header else {}
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(session.think_s)
                planned_s = self.elapsed_s
            prompt = [*prompt, *self._added[session.number][number]]
            record = Record(
                session.work, session.number, number, len(prompt), turn.output_tokens, planned_s, self.elapsed_s
            )
            self.num_sent += 1
            try:
                reply = await complete(http, target, prompt, record, headers)
            except asyncio.CancelledError:
                record.error = record.error or "cut off"
                self._end(record)
                raise
            self._end(record)
            if record.error:
                return
            prompt = [*prompt, *reply]

    def _end(self, record: Record) -> None:
        self.records.append(record)
        self._on_done(record)


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Garbage is looked for among new objects alone: all modules and prompts take milliseconds, added to some token."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
