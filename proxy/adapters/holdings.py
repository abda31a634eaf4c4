"""Which adapters there are, and which life of which worker has them. Pure.

offered   clients may ask for it
leaving   no new requests; it stays at workers until the last of its requests has ended
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from proxy.adapters.adapter import Adapter
from proxy.scheduling.view import AdapterView, WorkerFacts

Life = tuple[str, str]
"""Of a worker: its id and the epoch of its process."""


@dataclass(slots=True)
class Holdings:
    """Adapters by number."""

    offered: dict[int, Adapter] = field(default_factory=dict)
    leaving: dict[int, Adapter] = field(default_factory=dict)
    _asked: dict[int, Adapter] = field(default_factory=dict)
    """As their operators named them."""
    _held: dict[Life, set[int]] = field(default_factory=dict)
    _loads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often a name and path were offered in this run."""

    def named(self, name: str) -> Adapter | None:
        """The adapter that clients mean by this name."""
        return next((adapter for adapter in self.offered.values() if adapter.name == name), None)

    def was_asked_as(self, loaded: Adapter, asked: Adapter) -> bool:
        """Whether this is what the operator asks for."""
        return self._asked.get(loaded.adapter_id) == asked

    def knows(self, adapter: Adapter) -> bool:
        """Whether some request may still want it."""
        return adapter.adapter_id in self.offered or adapter.adapter_id in self.leaving

    def fresh(self, adapter: Adapter) -> Adapter:
        """As it is to be loaded now, so that earlier loads are others."""
        return adapter.loaded_again(self._loads[adapter.name, adapter.path])

    def clash(self, adapter: Adapter) -> Adapter | None:
        """Another adapter that happens to have the same number."""
        known = {**self.leaving, **self.offered}.get(adapter.adapter_id)
        return known if known is not None and (known.name, known.path) != (adapter.name, adapter.path) else None

    def offer(self, asked: Adapter, loaded: Adapter) -> None:
        """Workers have it. An earlier one of that name leaves. `asked`: as the operator named it."""
        self.withdraw(loaded.name)
        self._loads[asked.name, asked.path] += 1
        self.leaving.pop(loaded.adapter_id, None)
        self.offered[loaded.adapter_id], self._asked[loaded.adapter_id] = loaded, asked

    def withdraw(self, name: str) -> Adapter | None:
        """Clients may ask for it no more; the adapter, if there was one."""
        adapter = self.named(name)
        if adapter is not None:
            self.leaving[adapter.adapter_id] = self.offered.pop(adapter.adapter_id)
        return adapter

    def unused(self, in_use: Collection[int]) -> list[Adapter]:
        """Those that leave and are wanted by no request; they are forgotten here."""
        done = [adapter for number, adapter in self.leaving.items() if number not in in_use]
        for adapter in done:
            del self.leaving[adapter.adapter_id], self._asked[adapter.adapter_id]
        return done

    # --------------------------------------------------------------------------------------------------- workers

    def holds(self, life: Life, adapter: Adapter) -> bool:
        """Whether this life has loaded it."""
        return adapter.adapter_id in self._held.get(life, ())

    def take(self, life: Life, adapter: Adapter) -> None:
        """It has loaded it."""
        self._held.setdefault(life, set()).add(adapter.adapter_id)

    def give_back(self, adapter: Adapter) -> list[Life]:
        """Nobody is to have it any more; who had it."""
        had = [life for life, held in self._held.items() if adapter.adapter_id in held]
        for life in had:
            self._held[life].discard(adapter.adapter_id)
        return had

    def missing(self, life: Life) -> list[Adapter]:
        """What it has to load before it may have every request."""
        return [a for a in (*self.offered.values(), *self.leaving.values()) if not self.holds(life, a)]

    def forget_others(self, lives: Iterable[Life]) -> None:
        """These are the only ones left."""
        kept = set(lives)
        self._held = {life: held for life, held in self._held.items() if life in kept}

    def view(self, workers: Iterable[WorkerFacts]) -> AdapterView:
        """What placement needs to know."""
        held = frozenset(
            (facts.worker_id, number)
            for facts in workers
            for number in self._held.get((facts.worker_id, facts.epoch), ())
        )
        return AdapterView(frozenset((*self.offered, *self.leaving)), held)
