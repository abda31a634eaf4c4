"""Workers that drain, leave and change their role while requests run: nobody notices."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from cluster.messages import LEAVE
from proxy.workers.roster import Worker
from tests.unit.proxy.fake_worker import FakeWorker, generate
from tests.unit.proxy.mini_cluster import PROMPT, Answer, MiniCluster, mini_cluster, read, until

FOUR = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def worker(cluster: MiniCluster, worker_id: str) -> Worker:
    return cluster.pool.roster.workers[worker_id]


async def load(cluster: MiniCluster, answers: list[Answer], num_clients: int, stop: asyncio.Event) -> None:
    """Clients that send one request after another and check every answer."""

    async def client(number: int) -> None:
        while not stop.is_set():
            prompt = [number + 3, *PROMPT]
            answers.append(answer := await cluster.run(prompt, max_tokens=12))
            assert answer.tokens[0] == generate(prompt, 12)

    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            clients.create_task(client(number))


@pytest.mark.parametrize("reserve_at_start", [True, False])
async def test_any_worker_can_leave_under_load_and_no_request_fails(tmp_path: Path, reserve_at_start: bool) -> None:
    async with mini_cluster(tmp_path, *FOUR, reserve_at_start=reserve_at_start) as cluster:
        for fake in cluster.workers.values():
            fake.step_s = 0.002
        answers: list[Answer] = []
        stop = asyncio.Event()
        clients = asyncio.create_task(load(cluster, answers, 6, stop))
        for leaver in ("prefill-1", "decode-0"):
            before = len(answers)
            await until(lambda before=before: len(answers) > before + 6)  # type: ignore[misc]
            assert cluster.pool.drain(leaver, LEAVE, 60)
            await until(lambda leaver=leaver: not worker(cluster, leaver).alive)  # type: ignore[misc]
            assert cluster[leaver].left == "drained"
            assert not cluster[leaver].running
        before = len(answers)
        await until(lambda: len(answers) > before + 6)
        stop.set()
        await clients
        assert cluster.metric("replacements_total") == 0
        assert cluster.metric("illegal_transitions_total") == 0
        cluster.assert_idle()


async def test_a_worker_that_drains_by_itself_gets_nothing_new_and_leaves(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, *FOUR) as cluster:
        cluster["decode-0"].drain.order(LEAVE, 60)  # what its host does on SIGTERM
        await until(lambda: not worker(cluster, "decode-0").alive)
        assert worker(cluster, "decode-0").lost_by == "drained"
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
        assert cluster["decode-0"].submitted == []


async def test_a_decode_worker_still_gets_the_request_that_waits_for_its_prefill(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "decode-0", reserve_at_start=False) as cluster:
        cluster["prefill-0"].gate.clear()
        collector = await cluster.add(cluster.request())
        await until(lambda: cluster["prefill-0"].running)
        cluster.pool.drain("decode-0", LEAVE, 60)
        await until(lambda: worker(cluster, "decode-0").hello.drains_to)
        await asyncio.sleep(0.12)  # two beats
        assert not cluster["decode-0"].left
        cluster["prefill-0"].gate.set()
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        await until(lambda: cluster["decode-0"].left)


async def test_a_prefill_worker_finishes_what_is_queued_there(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, *FOUR[:3]) as cluster:
        for name in FOUR[:2]:
            cluster[name].gate.clear()
        collectors = [await cluster.add(cluster.request()) for _ in range(6)]
        await until(lambda: cluster["prefill-1"].running)
        cluster.pool.drain("prefill-1", LEAVE, 60)
        # Some may not have arrived there yet.
        queued = len(cluster.client.dispatcher.legs.workload("prefill-1").legs)
        later = await cluster.add(cluster.request())
        for name in FOUR[:2]:
            cluster[name].gate.set()
        for collector in [*collectors, later]:
            assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        await until(lambda: cluster["prefill-1"].left)
        assert len(cluster["prefill-1"].submitted) == queued


async def test_what_is_not_finished_in_time_is_placed_anew(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, *FOUR[:3]) as cluster:
        cluster["prefill-0"].gate.clear()
        cluster["prefill-1"].gate.clear()
        collectors = [await cluster.add(cluster.request()) for _ in range(2)]
        await until(lambda: cluster["prefill-1"].running)
        cluster.pool.drain("prefill-1", LEAVE, 0.05)
        await until(lambda: cluster["prefill-1"].left)
        cluster["prefill-0"].gate.set()
        for collector in collectors:
            assert (await read(collector)).tokens[0] == generate(PROMPT, 5)


async def test_without_a_decode_worker_requests_wait_for_the_next_one(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster.pool.drain("decode-0", LEAVE, 60)
        waiting = await cluster.add(cluster.request())
        await until(lambda: cluster["decode-0"].left)
        await cluster.join("decode-1")
        assert (await read(waiting)).tokens[0] == generate(PROMPT, 5)


async def test_without_a_decode_worker_nobody_waits_longer_than_the_queue_allows(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster.pool.drain("decode-0", LEAVE, 60)
        with pytest.raises(GracefulHTTPError, match="No worker could take the request, which arrived"):
            await cluster.run()


async def test_without_a_prefill_worker_the_policy_decides(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster.pool.drain("prefill-0", LEAVE, 60)
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
        assert cluster["prefill-0"].submitted == []
        assert cluster.metric("decisions_total", placement="local", reason="no_prefill_worker") == 1


def modes(requests: list[Any]) -> set[str]:
    """In which roles requests were served."""
    transfers = [(r.sampling_params.extra_args or {}).get("kv_transfer_params") for r in requests]
    return {transfer["mode"] if transfer else "local" for transfer in transfers}


async def test_a_worker_changes_its_role_under_load_and_serves_in_the_new_one(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, *FOUR) as cluster:
        answers: list[Answer] = []
        stop = asyncio.Event()
        clients = asyncio.create_task(load(cluster, answers, 6, stop))
        changed = cluster["prefill-1"]
        for role in ("decode", "prefill"):
            assert cluster.pool.drain("prefill-1", role, 60)
            await until(lambda role=role: worker(cluster, "prefill-1").role == role)  # type: ignore[misc]
            # Until then, what was placed there before may still have come.
            before, mode = len(changed.submitted), "import" if role == "decode" else "export"
            assert worker(cluster, "prefill-1").takes_requests
            await until(lambda before=before, mode=mode: mode in modes(changed.submitted[before:]))  # type: ignore[misc]
            assert modes(changed.submitted[before:]) <= {mode, "local"}
        stop.set()
        await clients
        assert not changed.left
        assert cluster.metric("replacements_total") == 0
        cluster.assert_idle()


async def test_who_changes_its_role_meets_its_new_partners(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, *FOUR) as cluster:
        assert cluster["prefill-1"].met == []
        cluster.pool.drain("prefill-1", "decode", 60)
        await until(lambda: cluster["prefill-1"].met == ["ipc://prefill-0"])
        cluster.pool.drain("decode-1", "prefill", 60)
        await until(lambda: "ipc://decode-1" in cluster["prefill-1"].met)
        assert "ipc://decode-1" in cluster["decode-0"].met


async def test_a_role_it_has_changes_nothing_and_ends_a_drain_towards_the_other(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, *FOUR) as cluster:
        cluster["prefill-1"].gate.clear()
        cluster.pool.drain("prefill-1", "prefill", 60)
        assert worker(cluster, "prefill-1").takes_requests
        collectors = [await cluster.add(cluster.request()) for _ in range(2)]
        await until(lambda: cluster["prefill-1"].running)
        cluster.pool.drain("prefill-1", "decode", 60)
        await until(lambda: worker(cluster, "prefill-1").hello.drains_to == "decode")
        cluster.pool.drain("prefill-1", "prefill", 60)
        await until(lambda: worker(cluster, "prefill-1").takes_requests)
        cluster["prefill-1"].gate.set()
        for collector in collectors:
            await read(collector)
        assert worker(cluster, "prefill-1").role == "prefill"


async def test_an_order_that_got_lost_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mini_cluster(tmp_path, *FOUR) as cluster:
        send = cluster.pool.send
        monkeypatch.setattr(cluster.pool, "send", lambda *_: False)
        cluster.pool.drain("decode-1", LEAVE, 60)
        monkeypatch.setattr(cluster.pool, "send", send)
        await until(lambda: cluster["decode-1"].left)


async def test_a_proxy_learns_of_a_drain_and_a_role_from_the_hello(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        fake = FakeWorker("decode-1", cluster.address, cluster.exchange)
        fake.drain.role = "prefill"
        await fake.start()
        cluster.workers["decode-1"] = fake
        await asyncio.wait_for(fake.welcomed.wait(), 3)
        assert worker(cluster, "decode-1").role == "prefill"
