"""Whatever happens in whatever order, these hold."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.models.answers import Admitted, Waits
from proxy.models.residency import Residency, Start, State, Stop
from proxy.models.terms import Terms

CAPACITY = 4
PINNED = {"m4": Terms(policy="pinned", cost=1)}
TERMS = st.builds(
    Terms,
    policy=st.sampled_from(["on_demand", "on_demand", "scale_to_zero"]),
    cost=st.integers(1, CAPACITY - 1),
    min_residency_s=st.sampled_from([0.0, 10.0, 60.0]),
    idle_s=st.sampled_from([1.0, 30.0]),
    on_starting=st.sampled_from(["wait", "wait", "reject"]),
    start_wait_s=st.sampled_from([5.0, 100.0]),
)
HAPPENINGS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 3)),
    st.tuples(st.just("arrive"), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("finish an order"), st.integers(0, 3)),
    st.tuples(st.just("finish an order"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 4)),
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
            if self.ordered.pop(name) == "start":
                self.residency.came_up(name, self.now_s)
                self.up_since_s[name] = self.now_s
            else:
                self.residency.ended(name, self.now_s)

    def fail(self, name: str) -> None:
        if name in self.up_since_s or name in self.ordered:
            self.up_since_s.pop(name, None)
            self.ordered.pop(name, None)
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
            if isinstance(order, Start):
                assert order.name not in self.ordered
                assert order.name not in self.up_since_s
                self.ordered[order.name] = "start"
            else:
                self.check_stop(order)
        load = sum(self.terms[name].cost for name in {*self.ordered, *self.up_since_s})
        assert load == self.residency.load <= CAPACITY
        return step.look_again_s

    def check_stop(self, order: Stop) -> None:
        if order.reason != "removed":
            assert order.name not in PINNED
            since_s = self.up_since_s[order.name]
            assert order.name not in self.running.values()
            assert self.now_s >= since_s + self.terms[order.name].min_residency_s
            self.evictions.append((order.name, since_s, self.now_s))
        self.up_since_s.pop(order.name, None)
        self.ordered[order.name] = "stop"


@given(terms=st.lists(TERMS, min_size=4, max_size=4), happenings=st.lists(HAPPENINGS, max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_order_of_events_breaks_a_promise(terms: list[Terms], happenings: list[tuple[str, int]]) -> None:
    named = {f"m{number}": each for number, each in enumerate(terms)} | PINNED
    residency = Residency(CAPACITY, max_waiting=5)
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
    assert all(resident.state in (State.UP, State.DOWN) for resident in residency)
    assert all(name in world.up_since_s for name in PINNED)
    assert residency.step(world.now_s).orders == ()
