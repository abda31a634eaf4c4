"""Adapters get to every worker or to none, and no worker is given a request with one that it lacks."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from proxy.adapters import registry as module
from proxy.adapters.adapter import Adapter
from proxy.adapters.registry import AdapterRegistry
from proxy.workers.engine_calls import EngineCalls, UtilityError
from proxy.workers.roster import Roster, Worker
from tests.unit.proxy.test_roster import hello, roster

POET, CLERK = Adapter("poet", "/adapters/poet"), Adapter("clerk", "/adapters/clerk")
BOTH = ("prefill-0", "decode-0")


class FakeEngines(EngineCalls):
    """Keeps what engines were asked to load."""

    def __init__(self) -> None:
        super().__init__(lambda _worker_id, _message: True)
        self.loaded: dict[str, list[int]] = {}
        self.asked: list[tuple[str, str]] = []
        self.broken: dict[str, Any] = {}
        """What an engine answers to `add_lora` instead."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def each(self, workers: Iterable[Worker], method: str, args: Any, timeout_s: float = 1.0) -> dict[str, Any]:
        names = [worker.worker_id for worker in workers]
        self.asked += [(name, method) for name in names]
        await self.gate.wait()
        return {name: self._answer(name, method, args[0]) for name in names}

    def _answer(self, name: str, method: str, argument: Any) -> Any:
        loaded = self.loaded.setdefault(name, [])
        if method == "add_lora":
            if name in self.broken:
                return self.broken[name]
            if argument[1] not in loaded:
                loaded.append(argument[1])
            return True
        known = argument in loaded
        if known:
            loaded.remove(argument)
        return known


class Situation:
    """Two workers, and what requests want."""

    def __init__(self, *worker_ids: str) -> None:
        self.roster: Roster = roster(*(worker_ids or BOTH))
        self.engines = FakeEngines()
        self.in_use: set[int] = set()
        self.told: list[list[str]] = []
        self.registry = AdapterRegistry(self.roster, self.engines, lambda: self.in_use, lambda: None)
        self.registry.announce_to(self._tell)

    async def _tell(self, adapters: list[Adapter]) -> None:
        self.told.append([adapter.name for adapter in adapters])

    def restart(self, worker_id: str, life: str) -> None:
        self.roster.admit(life.encode(), hello(worker_id, epoch=life), 0.0)
        self.registry.catch_up()

    def may_take(self, adapter: Adapter) -> list[str]:
        """Workers that are given requests with it."""
        view = self.registry.holdings.view(self.roster.facts())
        return [name for name in self.roster.workers if view.allows(name, adapter.adapter_id)]

    async def settle(self) -> None:
        """Until nothing is under way."""
        while self.registry._tasks:
            await asyncio.wait(self.registry._tasks, timeout=5)


async def test_an_adapter_is_offered_when_every_worker_has_it() -> None:
    it = Situation()
    it.engines.gate.clear()
    loading = asyncio.create_task(it.registry.load(POET))
    await asyncio.sleep(0)
    assert (it.told, it.may_take(POET)) == ([], [])
    it.engines.gate.set()
    assert await loading == POET
    assert it.told == [["poet"]]
    assert it.may_take(POET) == list(BOTH)
    assert it.may_take(CLERK) == []
    assert it.engines.loaded == {name: [POET.adapter_id] for name in BOTH}


async def test_an_adapter_that_is_there_is_not_loaded_again_unless_asked() -> None:
    it = Situation()
    await it.registry.load(POET)
    assert await it.registry.load(POET) == POET
    assert len(it.engines.asked) == 2


@pytest.mark.parametrize("answer", [UtilityError("worker decode-0: ValueError: rank 64"), False, None])
async def test_a_worker_that_cannot_load_it_is_named_and_the_others_drop_it(answer: Any) -> None:
    it = Situation()
    it.engines.broken = {"decode-0": answer}
    with pytest.raises(UtilityError, match=r"poet was not loaded: worker decode-0.*removed again from prefill-0"):
        await it.registry.load(POET)
    assert it.engines.loaded["prefill-0"] == []
    assert (it.told, it.may_take(POET)) == ([], [])


async def test_a_worker_that_dies_over_it_gets_it_when_it_comes_back() -> None:
    it = Situation()
    it.engines.gate.clear()
    it.engines.broken = {"decode-0": UtilityError("it is gone")}
    loading = asyncio.create_task(it.registry.load(POET))
    await asyncio.sleep(0)
    it.roster.lose("decode-0", "exited", "killed")
    it.engines.gate.set()
    await loading
    assert it.told == [["poet"]]
    it.engines.broken = {}
    it.restart("decode-0", "life-2")
    assert it.may_take(POET) == ["prefill-0"]
    await it.settle()
    assert it.may_take(POET) == list(BOTH)


async def test_a_new_life_has_nothing_until_it_has_loaded_it_and_a_new_worker_neither() -> None:
    it = Situation()
    await it.registry.load(POET)
    await it.registry.load(CLERK)
    it.engines.loaded.clear()
    it.restart("prefill-0", "life-2")
    it.restart("decode-1", "life-1")
    for adapter in (POET, CLERK):
        assert it.may_take(adapter) == ["decode-0"]
    await it.settle()
    for adapter in (POET, CLERK):
        assert it.may_take(adapter) == ["prefill-0", "decode-0", "decode-1"]
    assert sorted(it.engines.loaded) == ["decode-1", "prefill-0"]


async def test_what_a_newcomer_cannot_load_is_shown_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Situation()
    await it.registry.load(POET)
    it.engines.broken = {"decode-1": UtilityError("worker decode-1: no such directory")}
    it.restart("decode-1", "life-1")
    await it.settle()
    (status,) = it.registry.statuses()
    assert status.lacking == {"decode-1": "worker decode-1: no such directory"}
    asked = len(it.engines.asked)
    it.registry.beat()
    assert len(it.engines.asked) == asked
    it.engines.broken = {}
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    it.registry.beat()
    await it.settle()
    assert it.registry.statuses()[0].lacking == {}


async def test_a_removed_adapter_stays_at_workers_until_its_last_request_has_ended() -> None:
    it = Situation()
    await it.registry.load(POET)
    it.in_use = {POET.adapter_id}
    await it.registry.unload("poet")
    assert it.told == [["poet"], []]
    assert it.may_take(POET) == list(BOTH), "for continuations"
    it.restart("decode-0", "life-2")
    it.registry.beat()
    await it.settle()
    assert it.may_take(POET) == list(BOTH)
    assert [status.leaving for status in it.registry.statuses()] == [True]
    it.in_use = set()
    it.registry.beat()
    await it.settle()
    assert it.may_take(POET) == []
    assert it.engines.loaded == {name: [] for name in BOTH}
    assert it.registry.statuses() == []


async def test_weights_that_are_loaded_again_are_another_adapter_and_running_requests_keep_the_old() -> None:
    it = Situation()
    old = await it.registry.load(POET)
    it.in_use = {old.adapter_id}
    new = await it.registry.load(POET, again=True)
    assert (new.name, new.path) == ("poet", "/adapters/poet/.")
    assert it.engines.loaded == {name: [old.adapter_id, new.adapter_id] for name in BOTH}
    it.in_use = set()
    await it.registry.unload("poet")
    assert it.engines.loaded == {name: [] for name in BOTH}
    assert (await it.registry.load(POET)).path == "/adapters/poet/./."
    assert it.told[-1] == ["poet"]


async def test_a_failed_reload_leaves_the_old_one() -> None:
    it = Situation()
    await it.registry.load(POET)
    it.engines.broken = {"decode-0": UtilityError("worker decode-0: damaged file")}
    with pytest.raises(UtilityError, match="damaged file"):
        await it.registry.load(POET, again=True)
    assert it.may_take(POET) == list(BOTH)
    assert it.engines.loaded == {name: [POET.adapter_id] for name in BOTH}


async def test_a_newcomer_that_loads_what_is_removed_meanwhile_drops_it_again() -> None:
    it = Situation()
    await it.registry.load(POET)
    it.engines.gate.clear()
    it.restart("decode-1", "life-1")
    await asyncio.sleep(0)
    removing = asyncio.create_task(it.registry.unload("poet"))
    await asyncio.sleep(0)
    it.engines.gate.set()
    await removing
    await it.settle()
    assert it.engines.loaded["decode-1"] == []


async def test_without_workers_nothing_is_loaded() -> None:
    it = Situation()
    for name in BOTH:
        it.roster.lose(name, "exited", "killed")
    with pytest.raises(UtilityError, match="no worker is alive"):
        await it.registry.load(POET)


async def test_an_adapter_with_the_number_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "adapter_id", property(lambda _adapter: 7))
    it = Situation()
    await it.registry.load(POET)
    with pytest.raises(UtilityError, match="number of poet at /adapters/poet; load it under another name"):
        await it.registry.load(CLERK)
