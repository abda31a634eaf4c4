"""Keeps models up and lets requests in, as `Residency` decides."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import Histogram

from cluster.models.config import ModelsConfig
from cluster.models.messages import ModelList, ModelStatus
from cluster.models.models_file import ModelSpec, capacity_problems, name_problems
from cluster.preflight.problems import ConfigError, Problem
from proxy.models.answers import Admitted, Answer, Refused, Waits
from proxy.models.children import Child
from proxy.models.metrics import FrontMetrics
from proxy.models.residency import Residency
from proxy.models.residents import Order, Resident, Sleep, Start, State, Stop, Wake
from proxy.models.terms import Terms

log = logging.getLogger("twinpool.models")

_WHY = {
    "evicted": "another model needs its place",
    "idle": "nobody asked for it",
    "removed": "it is removed",
    "displaced": "another model sleeps in its stead (max_asleep)",
    "stuck": "it did not fall asleep or wake up",
}


class RequestRefused(Exception):
    """A request gets no place; the answer says why."""

    def __init__(self, answer: Refused) -> None:
        super().__init__(answer.text)
        self.answer = answer


class ModelsRefused(Exception):
    """An order about models cannot be carried out."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Processes(Protocol):
    """What starts and stops the clusters; see `Children`. It tells of their ends through `Keeper.down`."""

    def find(self, name: str) -> Child | None:
        """What there is of a model."""

    def start(self, spec: ModelSpec) -> None:
        """`Keeper.up` or `Keeper.down` follows."""

    def stop(self, name: str) -> None:
        """`Keeper.down` follows."""

    def sleep(self, name: str) -> None:
        """`Keeper.asleep`, `Keeper.stuck` or `Keeper.down` follows."""

    def wake(self, name: str) -> None:
        """`Keeper.woken`, `Keeper.stuck` or `Keeper.down` follows."""


class Keeper:
    """Owns the map of models. Lives in one event loop.

    `say` gets a sentence for the operator when a model comes or goes.
    """

    def __init__(self, config: ModelsConfig, metrics: FrontMetrics, say: Callable[[str], None]) -> None:
        self._config = config
        self._metrics = metrics
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._residency = Residency(config.capacity or math.inf, config.max_waiting, config.max_asleep)
        self._specs: dict[str, ModelSpec] = {}
        self._learned: dict[str, set[str]] = {}
        self._waiters: dict[int, asyncio.Future[Admitted | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def attach(self, processes: Processes, specs: Iterable[ModelSpec]) -> None:
        """Begins: `specs` are on the map from here on."""
        self._processes = processes
        for spec in specs:
            self._put(spec)
        self._act()

    # The map.

    @property
    def names(self) -> dict[str, str]:
        """Every name under which a model can be asked for, and which model it means."""
        found: dict[str, str] = {}
        for name in self.listed():
            found |= dict.fromkeys(self._learned.get(name, ()), name)
        for name in self.listed():
            found |= dict.fromkeys(self._specs[name].aliases, name)
        return {**found, **{name: name for name in self.listed()}}

    def listed(self) -> list[str]:
        """The models on the map, in the order in which they came."""
        return [resident.name for resident in self._residency if resident.listed]

    def learn(self, name: str, names: Iterable[str]) -> None:
        """A model that is up serves under these names too, such as those of LoRA adapters."""
        self._learned[name] = set(names)

    def status(self) -> ModelList:
        """All models, for operators."""
        models = [self._status_of(resident) for resident in self._residency]
        return ModelList(models, self._config.capacity, self._residency.load)

    def metrics_text(self) -> bytes:
        """`/metrics`."""
        return self._metrics.text(self._residency, self._residency.load)

    def missing(self) -> list[str]:
        """Pinned models that are not up."""
        return [r.name for r in self._residency if r.is_pinned and r.state is not State.UP]

    async def until_pinned_are_up(self) -> None:
        """Returns when none is missing."""
        while self.missing():
            self._changed.clear()
            await self._changed.wait()

    # Orders.

    def add(self, spec: ModelSpec) -> ModelStatus:
        """Puts a model on the map. Raises `ModelsRefused` or `ConfigError`."""
        if self._residency.find(spec.name) is not None:
            raise ModelsRefused(409, f"the model {spec.name} is there already, or has not gone yet")
        others = [self._specs[name] for name in self.listed()]
        problems: list[Problem] = name_problems([*others, spec])
        if (owner := self.names.get(spec.name)) is not None:
            problems.append(Problem(f"models.{spec.name}", f"the model {owner} has this name too", "Choose another"))
        if self._config.capacity is not None:
            costs = {s.name: (s.config.policy == "pinned", s.config.cost) for s in [*others, spec]}
            problems += capacity_problems(costs, self._config.capacity)
        if problems:
            raise ConfigError(problems)
        self._put(spec)
        self._act()
        resident = self._residency.find(spec.name)
        assert resident is not None
        log.info("model_added model=%s policy=%s", spec.name, spec.config.policy)
        return self._status_of(resident)

    def remove(self, name: str, within_s: float | None) -> float:
        """Lets a model finish what it has, takes it off the map, then ends its processes; in how many seconds at most
        it is off the map. Raises `ModelsRefused`."""
        if name not in self.listed():
            raise ModelsRefused(404, f"there is no model {name}; there are: {', '.join(self.listed()) or 'none'}")
        within_s = self._config.drain_timeout_s if within_s is None else within_s
        self._residency.remove(name, self._loop.time(), within_s)
        log.info("model_draining model=%s within_s=%g", name, within_s)
        self._act()
        return within_s

    def close(self) -> None:
        """Nothing is started any more; whoever waits is told."""
        self._residency.close(self._loop.time())
        self._act()

    # Requests.

    def child(self, name: str, *, or_asleep: bool = False) -> Child | None:
        """The cluster of a model that is up; `or_asleep`: also of one that sleeps."""
        resident = self._residency.find(name)
        states = (State.UP, State.ASLEEP) if or_asleep else (State.UP,)
        return self._processes.find(name) if resident is not None and resident.state in states else None

    @asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[Child]:
        """A place for one request at a model, which keeps it up until the end. Raises `RequestRefused`."""
        answer: Answer = self._residency.arrive(name, self._loop.time())
        if isinstance(answer, Refused):
            self._act()
            raise RequestRefused(answer)
        ticket = answer.ticket
        try:
            if isinstance(answer, Waits):
                waiter = self._waiters[ticket] = self._loop.create_future()
                self._act()
                answer = await waiter
            if isinstance(answer, Refused):
                raise RequestRefused(answer)
            child = self.child(name)
            if child is None:
                raise RequestRefused(Refused(503, "lost", f"The model {name} has just ended", 1.0))
            yield child
        finally:
            self._waiters.pop(ticket, None)
            self._residency.leave(ticket, self._loop.time())
            self._act()

    # What the processes tell.

    def up(self, name: str, took_s: float) -> None:
        """A model serves."""
        self._serves(name, State.STARTING, self._metrics.start_seconds, f"is up after {took_s:.1f} s", took_s)

    def asleep(self, name: str, took_s: float) -> None:
        """A model sleeps."""
        self._residency.fell_asleep(name, self._loop.time())
        self._say(f"{name} is asleep after {took_s:.1f} s")
        self._act()

    def woken(self, name: str, took_s: float) -> None:
        """A model that slept serves again."""
        self._serves(name, State.WAKING, self._metrics.wake_seconds, f"is awake after {took_s:.1f} s", took_s)

    def _serves(self, name: str, was: State, durations: Histogram, text: str, took_s: float) -> None:
        resident = self._residency.find(name)
        if resident is None or resident.state is not was:
            return  # it was told to stop meanwhile
        durations.labels(name).observe(took_s)
        self._residency.came_up(name, self._loop.time())
        self._say(f"{name} {text}")
        self._act()

    def stuck(self, name: str, cause: str) -> None:
        """A model did not fall asleep, or did not wake up."""
        if self._residency.find(name) is not None:
            self._residency.got_stuck(name, cause)
            self._say(f"{name}: {cause}")
            self._act()

    def down(self, name: str, cause: str) -> None:
        """Nothing is left of a model's processes."""
        resident = self._residency.find(name)
        assert resident is not None, "it had processes, so it is known"
        unasked = resident.state is not State.STOPPING
        self._residency.ended(name, self._loop.time(), cause)
        self._learned.pop(name, None)
        if self._residency.find(name) is None:
            del self._specs[name]
        if unasked:
            self._metrics.failures.labels(name).inc()
            self._say(f"{name} ended by itself: {cause}")
        self._act()

    # Small steps.

    def _put(self, spec: ModelSpec) -> None:
        terms = Terms(
            policy=spec.config.policy,
            cost=spec.config.cost,
            min_residency_s=spec.config.min_residency_s,
            idle_s=spec.config.idle_s,
            on_starting=spec.config.on_starting,
            start_wait_s=spec.config.start_wait_s,
            sleeps=spec.config.sleep,
        )
        self._residency.add(spec.name, terms, self._loop.time())
        self._specs[spec.name] = spec

    def _act(self) -> None:
        """Carries out what follows from all that has happened."""
        step = self._residency.step(self._loop.time())
        for verdict in step.verdicts:
            waiter = self._waiters.pop(verdict.ticket, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(verdict.answer)
        for name in step.off_the_map:
            self._say(f"{name} has finished its requests and is removed")
        for order in step.orders:
            self._give(order)
        for name in [name for name in self._specs if self._residency.find(name) is None]:
            del self._specs[name]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if step.look_again_s is not None:
            self._timer = self._loop.call_at(step.look_again_s, self._act)
        self._changed.set()

    def _give(self, order: Order) -> None:
        match order:
            case Start(name):
                self._metrics.starts.labels(name).inc()
                self._say(f"{name} is started")
                self._processes.start(self._specs[name])
            case Stop(name, reason):
                self._metrics.stops.labels(name, reason).inc()
                self._say(f"{name} is stopped: {_WHY[reason]}")
                self._processes.stop(name)
            case Sleep(name, reason):
                self._metrics.sleeps.labels(name, reason).inc()
                self._say(f"{name} is put to sleep: {_WHY[reason]}")
                self._processes.sleep(name)
            case Wake(name):
                self._metrics.wakes.labels(name).inc()
                self._say(f"{name} is woken")
                self._processes.wake(name)

    def _status_of(self, resident: Resident) -> ModelStatus:
        child = self._processes.find(resident.name)
        draining = resident.removed_by_s is not None and resident.listed
        return ModelStatus(
            name=resident.name,
            policy=resident.terms.policy,
            state="draining" if draining else resident.state.value,
            cost=resident.terms.cost,
            cause=resident.cause,
            running=len(resident.running),
            waiting=len(resident.waiting),
            starts=resident.starts,
            wakes=resident.wakes,
            aliases=self._specs[resident.name].aliases,
            log=str(child.log_path) if child is not None else "",
        )
