"""Who belongs to a pool, who leaves first, and what becomes of workers that are added and removed."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Role
from cluster.launch.seats import NothingFree
from cluster.messages import LEAVE
from cluster.orders import DrainOrder, RestartOrder, RoleOrder, ScaleOrder
from cluster.status import LaunchNote
from proxy.workers.administration import OrderRefused
from proxy.workers.resizing import Members, members
from proxy.workers.rolling_restart import RollingTimes
from proxy.workers.roster import Roster
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import PROMPT, MiniCluster, read, until
from tests.unit.proxy.test_administration import Control, administered, shown
from tests.unit.proxy.test_roster import hello, load

IDS = ("decode-0", "decode-1", "decode-2", "decode-3")


def roster(*worker_ids: str, expected: tuple[str, ...] = IDS) -> Roster:
    made = Roster(frozenset({"m"}), 5.0, expected)
    for number, worker_id in enumerate(worker_ids):
        made.admit(bytes([number]), hello(worker_id), 0.0)
    return made


def pool_of(known: Roster, role: Role = "decode", **notes: LaunchNote) -> Members:
    return members(known, {name.replace("_", "-"): note for name, note in notes.items()}, role, frozenset())


def test_a_pool_has_those_that_serve_come_or_change_to_it() -> None:
    known = roster("decode-0", "decode-1", "prefill-0", "prefill-1", expected=(*IDS, "prefill-0", "prefill-1"))
    known.order("prefill-1", "decode")
    known.lose("decode-1", "exited", "killed")
    again = pool_of(known, decode_1=LaunchNote(True, "it is started again in 1 s", 0))
    assert [worker.worker_id for worker in again.serving] == ["decode-0"]
    assert (again.changing, again.coming, again.away) == (("prefill-1",), ("decode-1", "decode-2", "decode-3"), ())
    given_up = pool_of(known, decode_1=LaunchNote(False, "it failed 5 times", 0))
    assert (given_up.count, given_up.away) == (4, ("decode-1",))
    assert pool_of(known, "prefill").count == 1


def test_who_leaves_by_order_of_the_operator_is_not_counted() -> None:
    known = roster("decode-0", "decode-1", expected=())
    known.order("decode-0", LEAVE)
    assert pool_of(known).count == 1


def test_those_leave_first_that_have_least_to_lose() -> None:
    known = roster(*IDS, expected=())
    for worker_id, running, free in (
        ("decode-0", 2, 90),
        ("decode-1", 0, 80),
        ("decode-2", 0, 90),
        ("decode-3", 0, 90),
    ):
        report = msgspec.structs.replace(load(worker_id, f"{worker_id}-life-1", free), num_running=running)
        report = msgspec.structs.replace(report, blocks_used=100 - free)
        known.report(known.workers[worker_id], report)
    now = pool_of(known)
    assert now.least_needed(4, {"decode-3": 7}) == ["decode-2", "decode-3", "decode-1", "decode-0"]
    assert now.least_needed(1, {}) == ["decode-3"], "of equals the newest"


def test_who_is_not_up_leaves_before_anybody_who_serves() -> None:
    assert pool_of(roster("decode-0", "decode-1")).least_needed(3, {}) == ["decode-3", "decode-2", "decode-1"]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["await", "join", "remove"]), max_size=40), st.randoms(use_true_random=False))
def test_a_number_is_never_given_to_two_workers(steps: list[str], random: object) -> None:
    known, seen = roster("decode-0", expected=("decode-0", "decode-1")), {}
    for number, step in enumerate(steps, start=2):
        worker_id = f"decode-{number}"
        if step == "await":
            known.await_worker(worker_id)
        elif step == "join":
            admission = known.admit(worker_id.encode(), hello(worker_id), 0.0)
            assert admission.worker is not None
            assert admission.worker.index not in seen.values()
            seen[worker_id] = admission.worker.index
        elif seen:
            known.remove(random.choice(sorted(seen)))  # type: ignore[attr-defined]


def test_a_removed_worker_is_unknown_and_does_not_come_back() -> None:
    known = roster("decode-0", "decode-1")
    known.lose("decode-1", "drained", "left")
    known.remove("decode-1")
    assert known.lose("decode-1", "exited", "its process ended later") is None
    known.expect("decode-1", returns=True)
    assert "decode-1" not in (*known.workers, *known.causes, *known.expected)
    assert "removed" in known.admit(b"x", hello("decode-1", epoch="another"), 1.0).refused


# ---------------------------------------------------------------------------------------------- with fake workers


class GrowingControl(Control):
    """Starts and ends fake workers."""

    def __init__(self, cluster: MiniCluster) -> None:
        super().__init__(cluster)
        self.next = {"prefill": 2, "decode": 2}
        self.removed: list[tuple[str, bool]] = []
        self.room = 3

    def hire(self, role: str, count: int) -> list[str]:
        if count > self.room:
            raise NothingFree(f"no GPUs are free for another {role} worker")
        self.room -= count
        hired = [f"{role}-{self.next[role] + number}" for number in range(count)]
        self.next[role] += count
        self.tasks += [asyncio.create_task(self.cluster.join(worker_id)) for worker_id in hired]
        return hired

    def remove(self, worker_id: str, *, at_once: bool = False) -> None:
        self.removed.append((worker_id, at_once))
        if at_once and worker_id in self.cluster.workers:
            self.cluster.pool.give_up(worker_id, "ended")


@pytest.fixture(autouse=True)
def _growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.proxy.test_administration.Control", GrowingControl)


async def test_a_pool_grows_and_shrinks_and_doing_it_twice_is_doing_it_once(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, _control):
        assert administration.scale(ScaleOrder("decode", 3)).workers == ["decode-2"]
        assert administration.scale(ScaleOrder("decode", 3)).within_s == 0.0
        assert shown(cluster, administration, "decode-2").state == "starting"
        await until(lambda: len(cluster.pool.roster.taking_requests("decode")) == 3)
        assert [worker.index for worker in cluster.pool.roster.alive("decode")] != [1, 1, 1]
        accepted = administration.scale(ScaleOrder("decode", 1))
        assert len(accepted.workers) == 2
        assert administration.scale(ScaleOrder("decode", 1)).within_s == 0.0
        await until(lambda: not administration.leaving)
        left = [worker_id for worker_id in cluster.pool.roster.workers if worker_id.startswith("decode")]
        assert len(left) == 1
        assert cluster.metric("workers_alive", role="decode") == 1
        assert administration.scale(ScaleOrder("decode", 2)).workers == ["decode-3"], "an id is never given out again"


async def test_a_worker_that_is_being_removed_is_not_started_again(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        stream = await cluster.add(cluster.request())
        (leaving,) = administration.scale(ScaleOrder("prefill", 1)).workers
        with pytest.raises(OrderRefused, match=f"{leaving} is being removed"):
            administration.restart(RestartOrder(leaving))
        assert control.started == []
        await read(stream)


async def test_requests_of_workers_that_are_removed_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, _control):
        collectors = [await cluster.add(cluster.request(max_tokens=20)) for _ in range(6)]
        administration.scale(ScaleOrder("decode", 1))
        administration.scale(ScaleOrder("prefill", 1))
        answers = [await read(collector) for collector in collectors]
        assert all(answer.tokens[0] == generate(PROMPT, 20) for answer in answers)
        await until(lambda: not administration.leaving)
        assert len(cluster.pool.roster.workers) == 2
        assert cluster.metric("replacements_total") == 0


async def test_what_cannot_be_scaled_is_refused_by_name(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_cluster, administration, control):
        with pytest.raises(OrderRefused, match="leave at least one"):
            administration.scale(ScaleOrder("decode", 0))
        with pytest.raises(OrderRefused, match="no GPUs are free"):
            administration.scale(ScaleOrder("decode", 9))
        administration.restart(RestartOrder("prefill-0"))
        with pytest.raises(OrderRefused, match="is under way"):
            administration.scale(ScaleOrder("decode", 3))
        assert isinstance(control, GrowingControl)
        assert control.room == 3


async def test_who_is_away_is_started_again_before_anybody_new_and_removed_if_nobody_needs_it(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        administration.drain("decode-1", DrainOrder())
        await until(lambda: not cluster.pool.roster.workers["decode-1"].alive)
        assert administration.scale(ScaleOrder("decode", 2)).workers == ["decode-1"]
        assert control.started == ["decode-1"]
        await until(lambda: cluster.pool.roster.workers["decode-1"].takes_requests)
        administration.drain("decode-1", DrainOrder())
        await until(lambda: not cluster.pool.roster.workers["decode-1"].alive)
        administration.scale(ScaleOrder("decode", 1))
        await until(lambda: "decode-1" not in cluster.pool.roster.workers)


async def test_who_does_not_leave_in_time_is_ended(tmp_path: Path) -> None:
    times = RollingTimes(drain_timeout_s=5, start_timeout_s=5, stop_s=0.05)
    async with administered(tmp_path, times=times) as (cluster, administration, control):
        for worker_id in ("decode-0", "decode-1"):
            cluster[worker_id]._tasks[2].cancel()  # it never says goodbye
        (leaver,) = administration.scale(ScaleOrder("decode", 1, timeout_s=0.05)).workers
        await until(lambda: leaver not in cluster.pool.roster.workers)
        assert isinstance(control, GrowingControl)
        assert control.removed == [(leaver, False), (leaver, True)]


async def test_a_worker_of_the_other_pool_counts_as_soon_as_it_is_told_to_change(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_cluster, administration, _control):
        administration.set_role("prefill-1", RoleOrder("decode"))
        assert administration.scale(ScaleOrder("decode", 3)).within_s == 0.0
        assert administration.scale(ScaleOrder("prefill", 1)).within_s == 0.0
