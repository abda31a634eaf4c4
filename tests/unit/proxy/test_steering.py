"""The controller gives the orders that an operator would give, to a cluster of fake workers."""

from pathlib import Path

import pytest

from cluster.launch.seats import NothingFree
from cluster.orders import RestartOrder
from cluster.preflight.config_file import load_config
from proxy.frontend.status_report import report
from proxy.scaling.autoscaler import Autoscaler
from proxy.scaling.look import Decision, Look
from proxy.scaling.rules import Bounds
from proxy.workers.administration import Administration
from proxy.workers.steering import Steering, scaling_rules
from tests.unit.proxy.mini_cluster import MiniCluster, read, until
from tests.unit.proxy.test_administration import administered
from tests.unit.proxy.test_resizing import GrowingControl

CONFIG = load_config(None, ["autoscale.enabled=true", "autoscale.decode.max=4", "autoscale.prefill.max=4"])


@pytest.fixture(autouse=True)
def _growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.proxy.test_administration.Control", GrowingControl)


class Script(Autoscaler):
    """Decides what it is told to and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__(scaling_rules(CONFIG, None))
        self.next: Decision | None = None
        self.seen: list[Look] = []

    def decide(self, look: Look) -> Decision:
        self.seen.append(look)
        decision, self.next = self.next, None
        return decision or Decision({role: pool.count for role, pool in look.pools.items()})


def steered(cluster: MiniCluster, administration: Administration) -> tuple[Steering, Script]:
    assert administration.resizing is not None
    metrics, script = cluster.pool._metrics, Script()
    dispatcher = cluster.client.dispatcher
    steering = Steering(dispatcher, administration, administration.resizing, scaling_rules(CONFIG, None), metrics)
    steering._autoscaler = script
    administration.steering = steering
    return steering, script


async def test_it_sees_what_clients_asked_for_and_got(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, _control):
        steering, script = steered(cluster, administration)
        for _ in range(3):
            await read(await cluster.add(cluster.request()))
        await until(lambda: not cluster.client.dispatcher.trips)
        steering.look(5.0, 5.0)
        look = script.seen[0]
        assert {role: (pool.serving, pool.coming) for role, pool in look.pools.items()} == {
            "prefill": (2, 0),
            "decode": (2, 0),
        }
        (arrivals,) = look.arrivals
        assert (arrivals.count, arrivals.prefill_s) == (3, ()), "three prompts tell too little of a worker's speed"
        assert (look.measured.first_tokens, look.measured.late, look.measured.streams) == (3, 0, 3)
        assert len(look.batches) == 2
        for _ in range(12):
            await read(await cluster.add(cluster.request()))
        await until(lambda: not cluster.client.dispatcher.trips)
        steering.look(5.0, 10.0)
        (arrivals,) = script.seen[1].arrivals
        assert (arrivals.count, len(arrivals.prefill_s)) == (12, 12), "what came since the last look"


async def test_it_starts_removes_and_converts_workers(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, _control):
        steering, script = steered(cluster, administration)
        script.next = Decision({"prefill": 2, "decode": 3}, 0, ("the work that arrives needs 3 decode workers",))
        steering.look(5.0, 5.0)
        await until(lambda: len(cluster.pool.roster.taking_requests("decode")) == 3)
        assert cluster.metric("workers_wanted", role="decode") == 3
        script.next = Decision({"prefill": 3, "decode": 2}, -1, ("one changes",))
        steering.look(5.0, 10.0)
        await until(lambda: len(cluster.pool.roster.taking_requests("prefill")) == 3)
        assert len(cluster.pool.roster.workers) == 5, "nobody came and nobody left"
        script.next = Decision({"prefill": 1, "decode": 2}, 0, ("too many",))
        steering.look(5.0, 15.0)
        await until(lambda: len(cluster.pool.roster.workers) == 3)
        status = report("m", cluster.pool, cluster.client.dispatcher, administration).autoscale
        assert status is not None
        assert (status.want, status.last_reason) == ({"prefill": 1, "decode": 2}, "too many")


async def test_what_is_refused_is_said_and_not_tried_again_at_once(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        steering, script = steered(cluster, administration)
        asked: list[int] = []

        def hire(role: str, count: int) -> list[str]:
            asked.append(count)
            raise NothingFree(f"no GPUs are free for another {role} worker")

        assert isinstance(control, GrowingControl)
        control.hire = hire  # type: ignore[method-assign]
        for now_s in (5.0, 10.0, 70.0):
            script.next = Decision({"prefill": 2, "decode": 4})
            steering.look(5.0, now_s)
        assert asked == [2, 2]
        steering.look(5.0, 75.0)
        assert steering.status.warnings == ["no GPUs are free for another decode worker"]


async def test_nothing_is_ordered_while_workers_are_started_again_one_after_another(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, _control):
        steering, script = steered(cluster, administration)
        administration.restart(RestartOrder("decode"))
        script.next = Decision({"prefill": 1, "decode": 3}, 1, ("the one that is started again is missing",))
        steering.look(5.0, 5.0)
        assert [worker.drains_to for worker in cluster.pool.roster.alive("prefill")] == ["", ""]
        assert steering.status.warnings == []
        await until(lambda: not administration.restarts)
        assert administration.rolling is not None
        assert administration.rolling.done == ["decode-0", "decode-1"]
        assert len(cluster.pool.roster.workers) == 4


async def test_a_pause_is_not_taken_for_time_without_load(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, _control):
        steering, script = steered(cluster, administration)
        steering.look(6.0, 6.0)
        steering.look(900.0, 906.0)
        assert [look.seconds for look in script.seen] == [6.0, 15.0]


async def test_a_refusal_is_forgotten_when_nothing_more_is_wanted(tmp_path: Path) -> None:
    async with administered(tmp_path) as (cluster, administration, control):
        steering, script = steered(cluster, administration)
        assert isinstance(control, GrowingControl)
        control.room = 0
        script.next = Decision({"prefill": 2, "decode": 3})
        steering.look(5.0, 5.0)
        steering.look(5.0, 10.0)
        assert len(steering.status.warnings) == 1, "said at the look after the one that was refused"
        steering.look(5.0, 15.0)
        assert steering.status.warnings == []


def test_bounds_come_from_the_configuration_and_the_devices() -> None:
    config = load_config(None, ["autoscale.prefill.max=3", "pools.decode.tensor_parallel=2", "autoscale.goal=0.9"])
    rules = scaling_rules(config, 8)
    assert rules.bounds["prefill"] == Bounds(1, 3)
    assert (rules.devices, dict(rules.ranks), rules.goal) == (8, {"prefill": 1, "decode": 2}, 0.9)
    assert not rules.convertible, "a worker of two ranks is no match for one of one"
