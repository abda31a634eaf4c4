"""Whatever happens in whatever order, these hold."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.models.answers import Admitted, Waits
from proxy.models.residency import Residency
from proxy.models.residents import Order, Sleep, Start, State, Stop, Wake
from proxy.models.terms import Terms

CAPACITY = 4
MAX_ASLEEP = 2
PINNED = {"m4": Terms(policy="pinned", cost=1)}
TERMS = st.builds(
    Terms,
    policy=st.sampled_from(["on_demand", "on_demand", "scale_to_zero"]),
    cost=st.integers(1, CAPACITY - 1),
    min_residency_s=st.sampled_from([0.0, 10.0, 60.0]),
    idle_s=st.sampled_from([1.0, 30.0]),
    on_starting=st.sampled_from(["wait", "wait", "reject"]),
    start_wait_s=st.sampled_from([5.0, 100.0]),
    sleeps=st.booleans(),
)
HAPPENINGS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 3)),
    st.tuples(st.just("arrive"), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("finish an order"), st.integers(0, 3)),
    st.tuples(st.just("finish an order"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 4)),
    st.tuples(st.just("get stuck"), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 3)),
    st.tuples(st.just("time"), st.sampled_from([1, 7, 40, 200])),
)


@dataclass
class World:
    """Carries out what the residency orders, and checks each step."""

    residency: Residency
    terms: dict[str, Terms]
    now_s: float = 0.0
    waiting: dict[int, float] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)
    up_since_s: dict[str, float] = field(default_factory=dict)
    ordered: dict[str, str] = field(default_factory=dict)
    asleep: set[str] = field(default_factory=set)
    beds: set[str] = field(default_factory=set)
    """Of which the host keeps the weights' memory."""
    evictions: list[tuple[str, float, float]] = field(default_factory=list)

    def happen(self, what: str, number: int) -> None:
        name = f"m{number}"
        match what:
            case "arrive":
                self.arrive(name)
            case "leave":
                self.leave(number)
            case "finish an order":
                self.finish(number)
            case "fail":
                self.fail(name)
            case "get stuck":
                if self.ordered.get(name) in ("sleep", "wake"):
                    self.residency.got_stuck(name, "it is stuck")
            case "remove":
                if (resident := self.residency.find(name)) is not None and resident.listed:
                    self.residency.remove(name, self.now_s, 30.0)
            case "time":
                self.pass_time(float(number))
        self.step()

    def arrive(self, name: str) -> None:
        answer = self.residency.arrive(name, self.now_s)
        if isinstance(answer, Waits):
            assert answer.until_s == self.now_s + self.terms[name].start_wait_s
            self.waiting[answer.ticket] = answer.until_s
        elif isinstance(answer, Admitted):
            assert name in self.up_since_s
            self.running[answer.ticket] = name

    def leave(self, number: int) -> None:
        tickets = [*self.running, *self.waiting]
        if tickets:
            ticket = tickets[number % len(tickets)]
            self.running.pop(ticket, None)
            self.waiting.pop(ticket, None)
            self.residency.leave(ticket, self.now_s)

    def finish(self, number: int) -> None:
        if self.ordered:
            name = list(self.ordered)[number % len(self.ordered)]
            match self.ordered.pop(name):
                case "start" | "wake":
                    self.residency.came_up(name, self.now_s)
                    self.up_since_s[name] = self.now_s
                case "sleep":
                    self.residency.fell_asleep(name, self.now_s)
                    self.asleep.add(name)
                case _:
                    self.beds.discard(name)
                    self.residency.ended(name, self.now_s)

    def fail(self, name: str) -> None:
        if name in {*self.up_since_s, *self.ordered, *self.asleep}:
            self.up_since_s.pop(name, None)
            self.ordered.pop(name, None)
            self.asleep.discard(name)
            self.beds.discard(name)
            self.residency.ended(name, self.now_s, "killed")

    def pass_time(self, seconds: float) -> None:
        """Looks again whenever it was told to."""
        end_s = self.now_s + seconds
        while (again_s := self.step()) is not None and again_s <= end_s:
            assert again_s > self.now_s
            self.now_s = again_s
        self.now_s = end_s

    def step(self) -> float | None:
        step = self.residency.step(self.now_s)
        for verdict in step.verdicts:
            until_s = self.waiting.pop(verdict.ticket)  # one that waits, and once
            assert self.now_s <= until_s
            if isinstance(verdict.answer, Admitted):
                owner = next(r.name for r in self.residency if verdict.ticket in r.running)
                assert owner in self.up_since_s
                self.running[verdict.ticket] = owner
        for order in step.orders:
            self.obey(order)
        assert len(self.beds) <= MAX_ASLEEP
        # Those that fall asleep and wait for a bed are in neither: nobody serves there, and they hold their place.
        waiting = {r.name for r in self.residency if r.state is State.FALLING_ASLEEP and r.name not in self.ordered}
        for name in waiting:
            self.put_aside(name)
        placed = {*(name for name, what in self.ordered.items() if what != "stop asleep"), *self.up_since_s, *waiting}
        assert sum(self.terms[name].cost for name in placed) == self.residency.load <= CAPACITY
        return step.look_again_s

    def obey(self, order: Order) -> None:
        match order:
            case Start(name):
                assert name not in {*self.ordered, *self.up_since_s, *self.asleep}
                self.ordered[name] = "start"
            case Wake(name):
                assert name not in self.ordered
                self.asleep.remove(name)
                self.ordered[name] = "wake"
            case Sleep(name):
                assert self.terms[name].sleeps
                assert name not in self.ordered
                self.put_aside(name)
                self.beds.add(name)
                self.ordered[name] = "sleep"
            case Stop():
                self.check_stop(order)

    def put_aside(self, name: str) -> None:
        """It serves no more."""
        assert name not in PINNED
        assert name not in self.running.values()
        if (since_s := self.up_since_s.pop(name, None)) is not None:
            assert self.now_s >= since_s + self.terms[name].min_residency_s

    def check_stop(self, order: Stop) -> None:
        if order.reason in ("evicted", "idle"):
            self.evictions.append((order.name, self.up_since_s[order.name], self.now_s))
            self.put_aside(order.name)
        elif order.reason == "displaced":
            assert order.name in self.asleep
        elif order.reason == "stuck":
            assert self.ordered[order.name] in ("sleep", "wake")
        self.up_since_s.pop(order.name, None)
        self.ordered[order.name] = "stop asleep" if order.name in self.asleep else "stop"
        self.asleep.discard(order.name)


@given(terms=st.lists(TERMS, min_size=4, max_size=4), happenings=st.lists(HAPPENINGS, max_size=60))
@settings(max_examples=60)
def test_no_order_of_events_breaks_a_promise(terms: list[Terms], happenings: list[tuple[str, int]]) -> None:
    named = {f"m{number}": each for number, each in enumerate(terms)} | PINNED
    residency = Residency(CAPACITY, max_waiting=5, max_asleep=MAX_ASLEEP)
    for name, each in named.items():
        residency.add(name, each, 0.0)
    world = World(residency, named)
    for what, number in happenings:
        world.happen(what, number)
    # Everybody gets an answer, and where nobody asks any more nothing is left half done.
    for ticket in list(world.running):
        world.running.pop(ticket)
        residency.leave(ticket, world.now_s)
    for _ in range(40):
        world.pass_time(50.0)
        while world.ordered:
            world.finish(0)
            world.step()
        for ticket in list(world.running):
            world.running.pop(ticket)
            residency.leave(ticket, world.now_s)
    assert world.waiting == {}
    assert residency._owners == {}, "nothing is remembered of requests that have ended"
    assert all(resident.state in (State.UP, State.DOWN, State.ASLEEP) for resident in residency)
    assert all(name in world.up_since_s for name in PINNED)
    assert residency.step(world.now_s).orders == ()
