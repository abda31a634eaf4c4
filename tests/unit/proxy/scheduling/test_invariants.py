"""Whatever happens in whatever order: every request is answered exactly once, and everything taken is given back."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.scheduling.place import Decision, Local, PrefillOnly, Reject, Remote, Wait
from proxy.scheduling.scheduler import Scheduler
from tests.unit.proxy.scheduling.situations import POLICY, facts, shape

WORKERS = [
    facts("p0", max_num_seqs=4),
    facts("p1", fingerprint="g", max_model_len=1000),
    facts("d0", num_blocks=90, max_num_seqs=3),
    facts("d1", fingerprint="g", num_blocks=150),
]
SHAPES = st.builds(
    shape,
    st.sampled_from([1, 30, 100, 400, 1500, 9000]),
    st.sampled_from([1, 16, 700]),
    ttft_s=st.sampled_from([0.3, 3.0, 30.0]),
    itl_s=st.sampled_from([0.05, 1.0]),
    on_overload=st.sampled_from(["queue", "demote", "reject"]),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(["a", "b"]),
    continues=st.sampled_from([False, False, True]),
    local_because=st.sampled_from(["", "", "pooling"]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), SHAPES),
        st.tuples(st.sampled_from(["complete", "remove", "retry", "follow"]), st.integers(0, 50)),
        st.tuples(st.just("pools"), st.sets(st.sampled_from(range(4)))),
        st.tuples(st.just("load"), st.integers(0, 200)),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=60,
)
POLICIES = st.builds(
    type(POLICY), st.just(64), st.sampled_from(["local", "queue", "reject"]), max_queued_requests=st.integers(1, 8)
)


class Game:
    """Plays steps, and keeps its own account of every request."""

    def __init__(self, policy: Any) -> None:
        self.scheduler = Scheduler(policy)
        self.scheduler.observe_pools(WORKERS, frozenset(), 0.0)
        self.now_s = 0.0
        self.states: dict[str, str] = {}  # "new", "waiting", "placed", or how it ended
        self.log: list[Any] = []

    def play(self, step: str, value: Any) -> None:
        self.now_s += 0.3
        now_s, scheduler = self.now_s, self.scheduler
        placed = [i for i, state in self.states.items() if state == "placed"]
        known = [i for i, state in self.states.items() if state in ("placed", "waiting")]
        match step:
            case "add":
                request_id = f"r{len(self.states)}"
                scheduler.add(request_id, value, now_s, now_s)
                self.states[request_id] = "new"
            case "complete" if placed:
                scheduler.complete(placed[value % len(placed)], now_s)
            case "remove" if known:
                request_id = known[value % len(known)]
                scheduler.remove(request_id, now_s, 10)
                self.states[request_id] = "removed"
            case "retry" if known:
                request_id = known[value % len(known)]
                scheduler.remove(request_id, now_s)
                scheduler.add(request_id, shape(400), 0.0, now_s)
                self.states[request_id] = "new"
            case "follow":
                request_id = f"r{len(self.states)}"
                if scheduler.follow(request_id, shape(400), f"d{value % 2}", now_s):
                    self.states[request_id] = "placed"
                else:
                    assert request_id not in scheduler.books.held, "no room takes no room"
            case "pools":
                scheduler.observe_pools([WORKERS[index] for index in sorted(value)], frozenset(), now_s)
            case "load":
                scheduler.observe_load("d1", value, 150)
            case "expire":
                for request_id in scheduler.expire(now_s, 5.0):
                    assert self.states[request_id] == "waiting"
                    self.states[request_id] = "expired"
        self.take(scheduler.place(now_s))

    def take(self, decisions: list[Decision]) -> None:
        self.log += decisions
        for decision in decisions:
            before = self.states[decision.request_id]
            match decision.placement:
                case Wait():
                    assert before == "new", "said once"
                    self.states[decision.request_id] = "waiting"
                case Reject():
                    assert before in ("new", "waiting")
                    self.states[decision.request_id] = "refused"
                case Remote() | PrefillOnly() | Local():
                    assert before in ("new", "waiting")
                    self.states[decision.request_id] = "placed"

    def check(self) -> None:
        states = list(self.states.values())
        assert "new" not in states, "everybody is answered at once"
        assert self.scheduler.num_waiting == states.count("waiting")
        assert len(self.scheduler.books.held) == states.count("placed")
        pools = self.scheduler.books.pools
        for worker in pools.decode.values():
            held = [h for h in self.scheduler.books.held.values() if h.decode is worker]
            assert worker.reserved == sum(h.blocks for h in held)
            assert (worker.num_requests, worker.num_running) == (len(held), sum(h.running for h in held))
            assert worker.local_prefills == sum(h.overflow for h in held)
            assert worker.listed == worker.order
        for prefill in pools.prefill.values():
            assert set(prefill.jobs) == {i for i, h in self.scheduler.books.held.items() if h.prefill is prefill}
            assert prefill.listed == prefill.order


@given(POLICIES, STEPS)
@settings(max_examples=60)
def test_every_request_is_answered_once_and_the_books_are_right(policy: Any, steps: list[tuple[str, Any]]) -> None:
    game = Game(policy)
    for step in steps:
        game.play(*step)
        game.check()
    # Everybody comes back, and whatever is placed ends: nobody is left.
    game.play("pools", {0, 1, 2, 3})
    game.play("load", 0)
    for _ in range(4 * len(steps)):
        game.play("complete", 0)
        game.play("remove", 0)
    game.check()
    assert game.scheduler.num_waiting == 0
    pools = game.scheduler.books.pools
    assert all(worker.jobs == {} for worker in pools.prefill.values())
    assert all(w.reserved == w.num_requests == w.num_running == w.local_prefills == 0 for w in pools.decode.values())


@given(POLICIES, STEPS)
@settings(max_examples=20)
def test_the_same_events_lead_to_the_same_decisions(policy: Any, steps: list[tuple[str, Any]]) -> None:
    games = [Game(policy), Game(policy)]
    for game in games:
        for step in steps:
            game.play(*step)
    assert games[0].log == games[1].log


@given(st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=30))
@settings(max_examples=20)
def test_nobody_starves_while_prompts_go_on_being_computed(requests: list[tuple[Any, bool]]) -> None:
    """Urgent requests never stop coming; everybody else gets a place all the same."""
    game = Game(POLICY)
    for request, _ in requests:
        game.play("add", request)
    waiting = {request_id for request_id, state in game.states.items() if state == "waiting"}
    for _ in range(250 + 60 * len(requests)):  # the latest deadlines must pass first
        if all(game.states[request_id] != "waiting" for request_id in waiting):
            return
        game.play("add", shape(1500, priority=-2000, ttft_s=1.0, on_overload="queue"))
        # One prompt ends and leaves.
        oldest = next(i for i, state in game.states.items() if state == "placed")
        game.scheduler.complete(oldest, game.now_s)
        game.scheduler.remove(oldest, game.now_s, 5)
        game.states[oldest] = "removed"
        game.take(game.scheduler.place(game.now_s))
    raise AssertionError(f"still waiting: {[i for i in waiting if game.states[i] == 'waiting']}")
