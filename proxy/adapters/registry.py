"""Loads adapters into every worker of both pools, and removes them; keeps workers that come later up to date.

An adapter is offered to clients when every living worker has it, or not at all: a worker that cannot load it is named,
and the others drop it again. Who joins, restarts or comes back is sent what it lacks, and gets no request with an
adapter before it has said that it loaded it (`Holdings.view`). What is removed stays at workers until the last request
with it has ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from cluster.status import AdapterStatus
from proxy.adapters.adapter import Adapter
from proxy.adapters.holdings import Holdings, Life
from proxy.supervision import log_failure
from proxy.workers.engine_calls import UTILITY_TIMEOUT_S, EngineCalls, UtilityError
from proxy.workers.roster import Roster, Worker

log = logging.getLogger("twinpool.proxy")

LOAD_TIMEOUT_S = 2 * UTILITY_TIMEOUT_S
"""Until `load` has ended, also badly."""
RETRY_S = 30.0
"""A worker that could not load an adapter when it came is asked again after so long."""

Tell = Callable[[list[Adapter]], Coroutine[Any, Any, None]]


class AdapterRegistry:
    """Used on the proxy's event loop.

    `in_use()` gives the adapters that requests want now; `on_change` is called when placement must look again.
    """

    def __init__(
        self, roster: Roster, calls: EngineCalls, in_use: Callable[[], Collection[int]], on_change: Callable[[], None]
    ) -> None:
        self.holdings = Holdings()
        self._roster = roster
        self._calls = calls
        self._in_use = in_use
        self._on_change = on_change
        self._tell: list[Tell] = []
        self._one_at_a_time = asyncio.Lock()
        self._faults: dict[tuple[Life, int], tuple[str, float]] = {}
        """Why a life of a worker lacks an adapter, and when that was found out."""
        self._catching_up: set[Life] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def announce_to(self, tell: Tell) -> None:
        """`tell` is awaited with all adapters whenever they change, and at once if there are any."""
        self._tell.append(tell)
        if self.holdings.offered:
            self._spawn(tell(self.offered()), "tell the adapters")

    def offered(self) -> list[Adapter]:
        """What clients may ask for."""
        return list(self.holdings.offered.values())

    # ------------------------------------------------------------------------------------------------- operators

    async def load(self, asked: Adapter, *, again: bool = False) -> Adapter:
        """Returns the adapter as it was loaded, when every living worker has it and every API server knows it.

        One that is offered already is returned as it is, unless it is to be loaded `again`: then requests that run go
        on with the old weights. Raises `UtilityError`; then nothing has changed.
        """
        async with self._one_at_a_time:
            known = self.holdings.named(asked.name)
            if known is not None and not again and self.holdings.was_asked_as(known, asked):
                return known
            adapter = self.holdings.fresh(asked)
            if (other := self.holdings.clash(adapter)) is not None:
                raise UtilityError(
                    f"{adapter.name} at {adapter.path} happens to get the number of {other.name} at {other.path}; "
                    "load it under another name"
                )
            workers = self._roster.alive()
            lives = {worker.worker_id: _life(worker) for worker in workers}
            had = {worker_id for worker_id, life in lives.items() if self.holdings.holds(life, adapter)}
            answers = await self._add(adapter, workers)
            # Who died over it gets it when it comes back.
            alive = {_life(worker) for worker in self._roster.alive()}
            still = {worker_id for worker_id, life in lives.items() if life in alive}
            faults = [str(answer) for worker_id, answer in answers.items() if worker_id in still and _failed(answer)]
            loaded = [worker_id for worker_id, answer in answers.items() if worker_id in still and not _failed(answer)]
            if faults or not loaded:
                undone = await self._undo(adapter, still - had)
                why = "; ".join(faults) or "no worker is alive"
                if loaded:
                    # Where a directory is missing on some machines, vLLM's server would find its own words for a
                    # missing adapter in this text, and answer with those instead of naming the worker.
                    why = why.replace(adapter.path, f"'{adapter.path}'")
                log.warning("adapter_not_loaded name=%s id=%d path=%s error=%s", *_words(adapter), why)
                raise UtilityError(f"the adapter {adapter.name} was not loaded: {why}{undone}")
            for worker_id in loaded:
                self.holdings.take(lives[worker_id], adapter)
            self.holdings.offer(asked, adapter)
            log.info("adapter_loaded name=%s id=%d path=%s workers=%s", *_words(adapter), ",".join(loaded))
            await self._changed()
        self.catch_up()
        return adapter

    async def unload(self, name: str) -> None:
        """New requests do not find it any more; workers drop it when the last request with it has ended.

        Raises `UtilityError` naming the workers that could not drop it; they give its place to the next one they need.
        """
        async with self._one_at_a_time:
            adapter = self.holdings.withdraw(name)
            if adapter is None:
                return
            log.info("adapter_withdrawn name=%s id=%d path=%s", *_words(adapter))
            await self._changed()
            faults = await self._drop_unused()
        if faults:
            raise UtilityError(f"the adapter {name} is offered no more, but: {'; '.join(faults)}")

    async def _add(self, adapter: Adapter, workers: list[Worker]) -> dict[str, Any]:
        answers = await self._calls.each(workers, "add_lora", [adapter.engine_argument()])
        return {
            worker_id: answer
            if answer is True or isinstance(answer, UtilityError)
            # vLLM's server does not look at the answer.
            else UtilityError(f"worker {worker_id}: its engine answered {answer!r} to add_lora")
            for worker_id, answer in answers.items()
        }

    async def _undo(self, adapter: Adapter, worker_ids: Collection[str]) -> str:
        """Also where no answer came: it may have been loaded since. The end of a sentence."""
        workers = [worker for worker in self._roster.alive() if worker.worker_id in worker_ids]
        answers = await self._calls.each(workers, "remove_lora", [adapter.adapter_id])
        # An engine without adapters cannot remove one either; it has none.
        removed = [worker_id for worker_id, answer in answers.items() if answer is True]
        return f"; it was removed again from {', '.join(removed)}" if removed else ""

    async def _changed(self) -> None:
        self._on_change()
        for tell in self._tell:
            await tell(self.offered())

    async def _drop_unused(self) -> list[str]:
        faults = []
        for adapter in self.holdings.unused(self._in_use()):
            lives = self.holdings.give_back(adapter)
            self._on_change()
            workers = [worker for worker in self._roster.alive() if _life(worker) in lives]
            answers = await self._calls.each(workers, "remove_lora", [adapter.adapter_id])
            faults += [str(answer) for answer in answers.values() if isinstance(answer, UtilityError)]
            log.info("adapter_removed name=%s id=%d path=%s", *_words(adapter))
        return faults

    # --------------------------------------------------------------------------------------------------- workers

    def catch_up(self) -> None:
        """Sends every living worker what it lacks. Called when one may lack something; does nothing otherwise."""
        now_s = time.monotonic()
        lives = {_life(worker) for worker in self._roster.workers.values()}
        self.holdings.forget_others(lives)
        self._faults = {key: fault for key, fault in self._faults.items() if key[0] in lives}
        for worker in self._roster.alive():
            life = _life(worker)
            missing = [a for a in self.holdings.missing(life) if self._may_try(life, a, now_s)]
            if missing and life not in self._catching_up:
                self._catching_up.add(life)
                self._spawn(self._replay(worker, life, missing), f"load adapters into {worker.worker_id}")

    def _may_try(self, life: Life, adapter: Adapter, now_s: float) -> bool:
        _, failed_s = self._faults.get((life, adapter.adapter_id), ("", -RETRY_S))
        return now_s - failed_s >= RETRY_S

    async def _replay(self, worker: Worker, life: Life, missing: list[Adapter]) -> None:
        try:
            for adapter in missing:
                answer = (await self._add(adapter, [worker]))[worker.worker_id]
                if _failed(answer):
                    self._faults[life, adapter.adapter_id] = (str(answer), time.monotonic())
                    log.warning("adapter_not_replayed worker=%s name=%s error=%s", life[0], adapter.name, answer)
                    continue
                self._faults.pop((life, adapter.adapter_id), None)
                if not self.holdings.knows(adapter):
                    await self._undo(adapter, [worker.worker_id])
                    continue
                self.holdings.take(life, adapter)
                log.info("adapter_replayed worker=%s name=%s id=%d", life[0], adapter.name, adapter.adapter_id)
                self._on_change()
        finally:
            self._catching_up.discard(life)

    def beat(self) -> None:
        """Tries again what failed, and drops what no request wants any more."""
        if self.holdings.offered or self.holdings.leaving:
            self.catch_up()
        if self.holdings.leaving and not self._one_at_a_time.locked():
            self._spawn(self._tidy(), "drop unused adapters")

    async def _tidy(self) -> None:
        async with self._one_at_a_time:
            for fault in await self._drop_unused():
                log.warning("adapter_not_removed error=%s", fault)

    # ---------------------------------------------------------------------------------------------------- status

    def statuses(self) -> list[AdapterStatus]:
        """Every adapter, and which living workers lack it."""
        return [
            AdapterStatus(adapter.name, adapter.path, number, leaving, self._lacking(adapter))
            for leaving, adapters in ((False, self.holdings.offered), (True, self.holdings.leaving))
            for number, adapter in adapters.items()
        ]

    def _lacking(self, adapter: Adapter) -> dict[str, str]:
        lives = [_life(worker) for worker in self._roster.alive()]
        return {
            life[0]: self._faults.get((life, adapter.adapter_id), ("it is being loaded", 0.0))[0]
            for life in lives
            if not self.holdings.holds(life, adapter)
        }

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)

    def close(self) -> None:
        """Stops what is under way."""
        for task in self._tasks:
            task.cancel()


def _life(worker: Worker) -> Life:
    return worker.worker_id, worker.hello.epoch


def _failed(answer: Any) -> bool:
    return isinstance(answer, UtilityError)


def _words(adapter: Adapter) -> tuple[str, int, str]:
    return adapter.name, adapter.adapter_id, adapter.path
