"""How workers are lost, and what becomes of those and of their requests."""

import asyncio
from pathlib import Path

from cluster import messages
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import DEAD_AFTER_S, PROMPT, failure, mini_cluster, read, until


async def test_a_prefill_worker_that_dies_is_replaced_by_another(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "prefill-1", "decode-0") as cluster:
        for name in ("prefill-0", "prefill-1"):
            cluster[name].gate.clear()
        collector = await cluster.add(cluster.request())
        await until(lambda: cluster["prefill-0"].submitted)
        cluster["prefill-1"].gate.set()
        cluster.pool.give_up("prefill-0", "Worker prefill-0 was killed")
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("replacements_total") == 1
        cluster.assert_idle()


async def test_a_prefill_worker_that_falls_silent_is_replaced_by_the_decode_worker(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].step_s = 30.0
        collector = await cluster.add(cluster.request())
        await until(lambda: cluster["decode-0"].submitted)
        cluster["prefill-0"].freeze()
        answer = await read(collector, timeout_s=DEAD_AFTER_S + 1)
        assert answer.tokens[0] == generate(PROMPT, 5)
        assert len(cluster["decode-0"].aborted) == 1
        cluster.assert_idle()


async def test_a_prefill_worker_that_dies_after_the_first_token_is_not_missed(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 0.02
        cluster["decode-0"].handover_outcome = "recompute"
        collector = await cluster.add(cluster.request())
        await until(lambda: cluster["decode-0"].first_tokens)
        cluster.pool.give_up("prefill-0", "Worker prefill-0 was killed")
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("handover_failures_total", kind="peer_lost") == 1


async def test_a_decode_worker_that_dies_in_mid_answer_without_another_is_an_error(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 30.0
        collector = await cluster.add(cluster.request())
        await until(lambda: cluster["decode-0"].first_tokens)
        cluster.kill("decode-0")
        error = await failure(cluster, collector)
        assert error.message.startswith(
            "Worker decode-0 was killed by SIGKILL, and no other worker took over: No decode"
        )
        assert cluster.metric("requests_failed_total", status="503", cause="exited") == 1


async def test_a_worker_that_says_goodbye_is_believed(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["decode-0"]
        worker.step_s = 30.0
        collector = await cluster.add(cluster.request())
        await until(lambda: worker.first_tokens)
        await worker.say(messages.Goodbye("decode-0", worker.epoch, "out of memory"))
        error = await failure(cluster, collector)
        assert error.message.startswith("Worker decode-0 left: out of memory")


async def test_answers_of_a_restarted_worker_go_on_there(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = 30.0
        collector = await cluster.add(cluster.request())
        await until(lambda: cluster["decode-0"].first_tokens)
        await cluster["decode-0"].stop()
        await cluster.join("decode-0")
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("migrations_total", cause="restarted") == 1
        cluster.assert_idle()


async def test_answers_of_a_worker_that_lost_sight_of_the_proxy_go_on_there(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["decode-0"]
        worker.step_s = 30.0
        collector = await cluster.add(cluster.request())
        await until(lambda: worker.first_tokens)
        worker.step_s = 0.0
        await worker.hello(proxies_lost=1)
        assert (await read(collector)).tokens[0] == generate(PROMPT, 5)
        assert cluster.metric("migrations_total", cause="rejoined") == 1
        assert len(worker.aborted) == 1, "what it may still have is not worked on"
        await until(lambda: not worker.running)


async def test_a_silent_worker_that_comes_back_is_told_to_drop_its_requests(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["decode-0"]
        worker.step_s = 30.0
        collector = await cluster.add(cluster.request())
        await until(lambda: worker.first_tokens)
        reader, beats, _ = worker._tasks
        reader.cancel()
        beats.cancel()
        await failure(cluster, collector)
        worker._tasks = [asyncio.create_task(worker._read()), asyncio.create_task(worker._beat())]
        await until(lambda: not worker.running)
        worker.step_s = 0.0
        await until(lambda: cluster.metric("workers_alive", role="decode") == 1)
        assert (await cluster.run()).tokens[0] == generate(PROMPT, 5)
