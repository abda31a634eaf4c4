"""The order of waiting requests by itself: fair queues against their definition, and lanes that starve nobody."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.scheduling.waiting.fair_queue import SLACK_S, Entry, FairQueue
from proxy.scheduling.waiting.lane import Lane
from tests.unit.proxy.scheduling.situations import shape


def entry(number: int, deadline_s: float, tenant: str = "", work_s: float = 1.0, priority: int = 0) -> Entry:
    request = shape(tenant=tenant, priority=priority)
    return Entry(str(number), request, number, 0.0, 0.0, deadline_s, work_s, work_s)


def drain(queue: FairQueue) -> list[Entry]:
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head, served=True)
        order.append(head)
    return order


@given(st.lists(st.integers(0, 20), max_size=30))
def test_one_tenants_requests_go_by_deadline(deadlines: list[int]) -> None:
    queue = FairQueue()
    for number, deadline in enumerate(deadlines):
        queue.push(entry(number, deadline))
    assert [e.deadline_s for e in drain(queue)] == sorted(deadlines)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 30), st.sampled_from("abc"), st.sampled_from([0.1, 0.7, 3.0])),
        st.tuples(st.just("serve"), st.just(0), st.just(""), st.just(0.0)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just(""), st.just(0.0)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_earliest_deadline_goes_first_among_tenants_that_are_not_ahead_of_their_share(steps: list) -> None:
    queue, waiting = FairQueue(), {}
    served: dict[str, float] = {}
    for number, (step, value, tenant, work_s) in enumerate(steps):
        if step == "push":
            if not waiting:
                served = {}
            competing = [served.get(e.shape.standing.tenant, 0.0) for e in waiting.values()]
            if tenant not in {e.shape.standing.tenant for e in waiting.values()}:
                served[tenant] = max(served.get(tenant, 0.0), min(competing, default=0.0))
            waiting[number] = entry(number, value, tenant, work_s)
            queue.push(waiting[number])
        elif step == "leave" and waiting:
            gone = waiting.pop(list(waiting)[value % len(waiting)])
            queue.remove(gone, served=False)
        elif step == "serve":
            head = queue.head()
            assert (head is None) == (not waiting)
            if head is None:
                continue
            least = min(served[e.shape.standing.tenant] for e in waiting.values())
            allowed = [e for e in waiting.values() if served[e.shape.standing.tenant] <= least + SLACK_S]
            assert head is min(allowed, key=lambda e: e.key)
            del waiting[head.seq]
            queue.remove(head, served=True)
            served[head.shape.standing.tenant] += head.work_s
        assert queue.count == len(waiting)
        assert abs(queue.work_s - sum(e.work_s for e in waiting.values())) < 1e-6


def test_tenants_that_come_once_are_forgotten_though_the_queue_never_gets_empty() -> None:
    queue, waiting = FairQueue(), 0
    for number in range(3000):
        for tenant in ("always here", f"stranger {number}"):
            queue.push(entry(waiting, float(waiting), tenant, 0.01))
            waiting += 1
        for _ in range(2 if number else 1):
            head = queue.head()
            assert head is not None
            queue.remove(head, served=True)
        assert queue.count
    assert len(queue._shares) < 200


def test_whoever_is_overdue_gets_a_part_however_many_more_urgent_ones_come() -> None:
    lane = Lane()
    lane.push(entry(0, deadline_s=1.0, priority=5))
    for number in range(1, 40):
        now_s = 10.0 + number
        lane.push(entry(number, deadline_s=now_s + 1.0))
        head = lane.head(now_s)
        assert head is not None
        lane.served(head, now_s)
        lane.remove(head, now_s, served=True)
        if head.seq == 0:
            assert number > 10, "its part is small"
            return
    raise AssertionError("it starves")


def test_waiting_is_predicted_from_what_is_ahead_and_from_the_pace_so_far() -> None:
    lane = Lane()
    entries = [entry(number, deadline_s=float(number)) for number in range(10)]
    for waiting in entries:
        lane.push(waiting)
    assert lane.wait_s(entries[6], workers=2) == 3.0
    urgent = entry(99, deadline_s=50.0, priority=-1)
    lane.push(urgent)
    assert lane.wait_s(urgent, workers=2) == 0.0
    lane.remove(urgent, 0.0, served=False)
    for number in range(5):
        # Something else holds them up: one leaves every 5 s.
        lane.remove(entries[number], 5.0 * number, served=True)
    assert 2 * 4.0 < lane.wait_s(entries[7], workers=2) <= 2 * 5.0
