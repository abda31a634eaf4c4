"""Health and readiness of a cluster of fake workers, through the real dispatcher."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.config import LivenessConfig
from proxy.health.cluster_health import ClusterHealth
from tests.unit.proxy.mini_cluster import MiniCluster, mini_cluster, until

STALLED_AFTER_S = 0.3


def health_of(cluster: MiniCluster, *supervised: "asyncio.Task[Any]") -> ClusterHealth:
    liveness = LivenessConfig(heartbeat_s=0.05, stalled_after_s=STALLED_AFTER_S)
    return ClusterHealth(cluster.pool, cluster.client.dispatcher, liveness, supervised)


@pytest.mark.parametrize("stuck", ["prefill-0", "decode-0"])
async def test_a_worker_that_is_stuck_is_named_until_it_goes_on(tmp_path: Path, stuck: str) -> None:
    async with mini_cluster(tmp_path) as cluster:
        health = health_of(cluster)
        assert health.faults() == [], "idle is healthy"
        cluster[stuck].gate.clear()
        await cluster.add(cluster.request())
        await until(health.faults)
        (fault,) = health.faults()
        assert fault.startswith(f"worker {stuck} has requests and no token or chunk came from it")
        cluster[stuck].gate.set()
        await until(lambda: not health.faults() and not cluster.client.dispatcher.trips)


async def test_a_long_prompt_of_many_chunks_is_not_stuck(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        health = health_of(cluster)
        cluster["prefill-0"].gate.clear()
        cluster["prefill-0"].tokens_per_report = 512
        await cluster.add(cluster.request())
        for _ in range(6):
            await asyncio.sleep(STALLED_AFTER_S / 4)
            assert health.faults() == []
        cluster["prefill-0"].tokens_per_report = 0
        await until(health.faults)


async def test_without_a_decode_worker_nobody_is_well(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        health = health_of(cluster)
        cluster.pool.give_up("prefill-0", "Worker prefill-0 died")
        assert health.faults() == []
        cluster.pool.give_up("decode-0", "Worker decode-0 died")
        assert health.faults() == ["no decode worker is alive, so nobody generates tokens"]
        cluster.pool.roster.restarts = True
        cluster.pool.give_up("decode-0", "Worker decode-0 died", returns=True)
        assert health.faults() == [], "it is being started again"
        cluster.pool.give_up("decode-0", "Worker decode-0 failed too often", returns=False)
        assert health.faults() != []


async def test_a_task_of_the_proxy_that_ended_is_a_fault(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        task = asyncio.create_task(asyncio.sleep(0), name="worker-beats")
        health = health_of(cluster, task)
        assert health.faults() == []
        await task
        assert health.faults() == ["the proxy's task worker-beats has ended"]


async def test_only_a_hand_over_that_was_loaded_and_decoded_makes_it_ready(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:

        async def no_probe() -> None:
            raise ValueError("none")

        async def is_ready() -> bool:
            return not await health_of(cluster).readiness(no_probe).reason()

        await cluster.run(prompt=[5, 6])
        assert not await is_ready(), "one worker did it all"
        await cluster.run(max_tokens=1)
        assert not await is_ready(), "the decode worker was not needed"
        cluster["decode-0"].handover_outcome = "recompute"
        await cluster.run()
        assert not await is_ready(), "the blocks did not get there"
        cluster["decode-0"].handover_outcome = "loaded"
        await cluster.run(presence_penalty=0.5)
        assert await is_ready(), "exact mode"
        cluster.client.dispatcher.witness.handed_over_at_s = None
        assert await health_of(cluster).readiness(cluster.run).reason() == "", "a request of its own"


async def test_it_is_not_ready_while_a_pool_takes_no_requests(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await cluster.run()
        readiness = health_of(cluster).readiness(lambda: asyncio.sleep(0))
        assert await readiness.reason() == ""
        cluster.pool.give_up("prefill-0", "Worker prefill-0 died")
        assert await readiness.reason() == "no prefill worker takes requests"
