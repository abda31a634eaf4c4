"""Simulated workers that are put to sleep and woken, over the real wire, dispatcher and pool."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from cluster.host import drain, slumber
from cluster.host.proxy_line import ProxyLine
from cluster.messages import DropTransfers
from cluster.orders import DrainOrder, SleepOrder, WakeOrder
from cluster.simulated import reports
from cluster.simulated.host import SimulatedWorker
from proxy.frontend.status_report import report
from proxy.workers.administration import Administration, OrderRefused
from proxy.workers.engine_calls import UtilityError
from proxy.workers.rolling_restart import RollingTimes
from proxy.workers.sleeping import SleepFailed, Sleeping
from tests.unit.proxy.mini_cluster import until
from tests.unit.proxy.test_simulated_workers import PROMPT, Cluster, answer_to

SLOW: dict[str, Any] = {"speed": "modelled", "decode_step_s": 0.02, "chunk_s": 0.001}


@pytest.fixture(autouse=True)
def soon_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slumber, "SETTLE_S", 0.05)
    monkeypatch.setattr(drain, "SETTLE_S", 0.05)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for process in made.processes:
        await process.kill()
    await made.proxy.close()


class Bed:
    """Sleeping of a cluster, with its supervised task."""

    def __init__(self, cluster: Cluster) -> None:
        pool, self.door = cluster.proxy.pool, cluster.proxy.client.dispatcher
        self.administration = Administration(pool, None, RollingTimes(5, 5, 5))
        self.sleeping = Sleeping(pool, self.administration, self.door, drain_timeout_s=30)
        self.task = asyncio.create_task(self.sleeping.run())
        self._pool = pool

    @property
    def states(self) -> list[str]:
        status = report("m", self._pool, self.door, self.administration, (), self.sleeping.state)
        return [status.sleep, *(worker.state for worker in status.workers)]

    @property
    def epochs(self) -> set[str]:
        return {worker.hello.epoch for worker in self._pool.roster.alive()}

    async def cause(self) -> str:
        with pytest.raises(SleepFailed) as caught:
            await asyncio.wait_for(self.task, 10)
        return str(caught.value)


@pytest.fixture
async def bed(cluster: Cluster) -> AsyncIterator[Bed]:
    made = Bed(cluster)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_cluster_sleeps_refuses_requests_says_so_and_wakes_with_the_same_answers(
    cluster: Cluster, bed: Bed
) -> None:
    await cluster.start("a", "prefill-0", wake_s=0)
    await cluster.start("b", "decode-0", wake_s=0)
    before = await cluster.proxy.run(PROMPT, max_tokens=8)
    await until(lambda: cluster.proxy.pool.prefixes.index.num_blocks > 0)
    assert (await bed.sleeping.sleep(SleepOrder())).state == "asleep"
    await until(lambda: bed.states == ["asleep", "asleep", "asleep"])
    await until(lambda: cluster.proxy.pool.prefixes.index.num_blocks == 0)
    assert cluster.blocks() == [(64, 0, 0), (64, 0, 0)]
    with pytest.raises(GracefulHTTPError, match="asleep"):
        await cluster.proxy.run(PROMPT, max_tokens=8)
    with pytest.raises(OrderRefused, match="wake them first"):
        bed.administration.drain("prefill-0", DrainOrder())
    epochs = bed.epochs
    assert (await bed.sleeping.wake(WakeOrder())).state == "awake"
    await until(lambda: bed.states == ["awake", "ready", "ready"])
    after = await cluster.proxy.run(PROMPT, max_tokens=8)
    assert after.tokens == before.tokens == {0: answer_to(PROMPT, 8)}
    assert bed.epochs == epochs
    assert not bed.task.done()


async def test_requests_that_run_are_finished_first_and_new_ones_refused(cluster: Cluster, bed: Bed) -> None:
    await cluster.start("a", "prefill-0", **SLOW)
    await cluster.start("b", "decode-0", **SLOW)
    running = asyncio.create_task(cluster.proxy.run(PROMPT, max_tokens=20))
    await until(lambda: bool(bed.door.trips))
    falling = asyncio.create_task(bed.sleeping.sleep(SleepOrder()))
    await until(lambda: bed.sleeping.state == "falling asleep")
    with pytest.raises(GracefulHTTPError, match="asleep"):
        await cluster.proxy.run(PROMPT, max_tokens=2)
    assert (await running).tokens == {0: answer_to(PROMPT, 20)}
    assert (await falling).state == "asleep"


async def test_requests_that_take_too_long_keep_the_cluster_awake(cluster: Cluster, bed: Bed) -> None:
    await cluster.start("a", "prefill-0", **SLOW)
    await cluster.start("b", "decode-0", **SLOW)
    running = asyncio.create_task(cluster.proxy.run(PROMPT, max_tokens=30))
    await until(lambda: bool(bed.door.trips))
    with pytest.raises(OrderRefused, match="1 requests were not finished within"):
        await bed.sleeping.sleep(SleepOrder(timeout_s=0.1))
    assert bed.sleeping.state == "awake"
    assert (await cluster.proxy.run(PROMPT, max_tokens=2)).tokens == {0: answer_to(PROMPT, 2)}
    assert (await running).tokens == {0: answer_to(PROMPT, 30)}


async def test_a_worker_with_an_open_lease_does_not_fall_asleep_and_the_cluster_ends(
    cluster: Cluster, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slumber, "WITHIN_S", 0.3)
    monkeypatch.setattr(ProxyLine, "carried", lambda line: drain.Carried(0, 1, 0.0, True))
    await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0")
    with pytest.raises(OrderRefused, match="still has 0 requests and 1 transfers"):
        await bed.sleeping.sleep(SleepOrder())
    assert "could not carry out sleep" in await bed.cause()


async def test_a_worker_that_waits_for_its_lease_sleeps_when_that_is_dropped(
    cluster: Cluster, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = [1]
    monkeypatch.setattr(ProxyLine, "carried", lambda line: drain.Carried(0, open_[0], 0.0, True))
    await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0")
    falling = asyncio.create_task(bed.sleeping.sleep(SleepOrder()))
    await until(lambda: bool(bed.sleeping._sleepers))
    cluster.proxy.pool.send("prefill-0", DropTransfers(["t"]))  # heard while it waits
    assert not falling.done()
    open_[0] = 0
    assert (await falling).state == "asleep"


async def test_the_death_of_a_sleeper_is_noticed_and_ends_the_cluster(cluster: Cluster, bed: Bed) -> None:
    process = await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0")
    await bed.sleeping.sleep(SleepOrder())
    await process.kill()
    cluster.processes.remove(process)
    cluster.proxy.pool.give_up("prefill-0", "Worker prefill-0 was killed by SIGKILL")
    assert await bed.cause() == (
        "prefill-0 was lost while the cluster was asleep: Worker prefill-0 was killed by SIGKILL"
    )


async def test_an_engine_that_does_not_wake_ends_the_cluster(
    cluster: Cluster, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0")
    await bed.sleeping.sleep(SleepOrder())

    async def out_of_memory(_worker: SimulatedWorker, _method: str, _args: list[Any]) -> Any:
        raise RuntimeError("CUDA out of memory")

    for worker in (worker for process in cluster.processes for worker in process.workers):
        monkeypatch.setattr(worker._slumber, "_call_engine", out_of_memory.__get__(worker))
    with pytest.raises(OrderRefused, match="CUDA out of memory"):
        await bed.sleeping.wake(WakeOrder())
    assert "could not carry out wake_up" in await bed.cause()


async def test_an_engine_that_takes_too_long_to_wake_ends_the_cluster(cluster: Cluster, bed: Bed) -> None:
    slow = {"speed": "modelled", "wake_s": 600}
    await cluster.start("a", "prefill-0", **slow)
    await cluster.start("b", "decode-0", **slow)
    await bed.sleeping.sleep(SleepOrder())
    with pytest.raises(OrderRefused, match="did not answer wake_up within"):
        await bed.sleeping.wake(WakeOrder(timeout_s=0.2))
    assert "could not carry out wake_up" in await bed.cause()


async def test_workers_live_on_while_waking_takes_longer_than_silence_may(cluster: Cluster, bed: Bed) -> None:
    slow = {"speed": "modelled", "wake_s": 0.8, "chunk_s": 0, "decode_step_s": 0.001}
    cluster.proxy.pool.roster.dead_after_s = 0.5
    await cluster.start("a", "prefill-0", **slow)
    await cluster.start("b", "decode-0", **slow)
    await bed.sleeping.sleep(SleepOrder())
    await bed.sleeping.wake(WakeOrder())
    assert (await cluster.proxy.run(PROMPT, max_tokens=2)).tokens == {0: answer_to(PROMPT, 2)}
    assert not bed.task.done()


async def test_what_an_engine_is_asked_while_it_sleeps_is_refused_by_its_host(cluster: Cluster, bed: Bed) -> None:
    await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0")
    await bed.sleeping.sleep(SleepOrder())
    pool = cluster.proxy.pool
    assert set((await pool.call_all("is_sleeping")).values()) == {True}
    with pytest.raises(UtilityError, match="add_lora is not possible: the engine is asleep"):
        await pool.call_all("add_lora", ["name", 1, "path"])
    bed.door.hold_off(None)  # a request comes through all the same
    answer = await asyncio.wait_for(cluster.proxy.run(PROMPT, max_tokens=2), 10)
    assert answer.finish_reasons == {0: "error"}
    assert cluster.blocks() == [(64, 0, 0), (64, 0, 0)]


async def test_who_cannot_sleep_is_named_with_what_to_do(
    cluster: Cluster, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = reports.wire.EngineFacts
    monkeypatch.setattr(reports.wire, "EngineFacts", lambda **fields: facts(**{**fields, "can_sleep": False}))
    await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0")
    with pytest.raises(OrderRefused, match="prefill-0, decode-0: the engine was started without sleep mode"):
        await bed.sleeping.sleep(SleepOrder())
    with pytest.raises(UtilityError, match="level 2 is not possible"):
        await cluster.proxy.pool.call_all("sleep", 2, "abort")
