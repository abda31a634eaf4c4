"""The scheduler's shell on a real socket: what waits in the proxy, when it goes, and what the client is told."""

from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, FinishReason

from proxy.flights.flight import Stage
from tests.unit.proxy.fake_worker import generate
from tests.unit.proxy.mini_cluster import failure, mini_cluster, read, until

LONG = list(range(10, 610))
"""More than a chunk."""


async def test_prompts_wait_in_the_proxy_until_a_prefill_worker_is_nearly_free(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        prefill, dispatcher = cluster["prefill-0"], cluster.client.dispatcher
        prefill.gate.clear()
        collectors = [await cluster.add(cluster.request(LONG)) for _ in range(4)]
        leaves = cluster.request(LONG)
        await cluster.add(leaves)
        await until(lambda: cluster.metric("requests_open", stage="waiting") == 3)
        assert len(prefill.submitted) == 2, "one computed, one ready"
        assert cluster.metric("decisions_total", placement="wait", reason="prefill_full") == 3
        await cluster.abort(leaves.request_id)
        assert dispatcher.num_waiting == 2
        prefill.gate.set()
        for collector in collectors:
            assert (await read(collector)).tokens[0] == generate(LONG, 5)
        cluster.assert_idle()


async def test_a_queue_that_is_full_answers_429_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, max_queued_requests=1) as cluster:
        cluster["prefill-0"].gate.clear()
        collectors = [await cluster.add(cluster.request(LONG)) for _ in range(4)]
        with pytest.raises(GracefulHTTPError) as caught:
            await read(collectors.pop())
        assert caught.value.http_status == 429
        assert cluster.metric("decisions_total", placement="reject", reason="queue_full") == 1
        cluster["prefill-0"].gate.set()
        for collector in collectors:
            await read(collector)
        cluster.assert_idle()


async def test_a_prefill_worker_that_dies_gives_its_place_in_the_queue_to_nobody(tmp_path: Path) -> None:
    """What it carried is placed again with those that waited."""
    async with mini_cluster(tmp_path, "prefill-0", "prefill-1", "decode-0") as cluster:
        for name in ("prefill-0", "prefill-1"):
            cluster[name].gate.clear()
        collectors = [await cluster.add(cluster.request([5 + n, *LONG])) for n in range(6)]
        await until(lambda: len(cluster["prefill-0"].submitted) + len(cluster["prefill-1"].submitted) == 4)
        cluster.pool.give_up("prefill-0", "Worker prefill-0 was killed")
        cluster["prefill-1"].gate.set()
        for number, collector in enumerate(collectors):
            assert (await read(collector)).tokens[0] == generate([5 + number, *LONG], 5)
        served = [request.prompt_token_ids[0] for request in cluster["prefill-1"].submitted]
        assert served[2] == 5, "the oldest goes first"
        assert {5, 7} <= set(served[2:]), "the decode worker may help out with those that would be late"
        cluster.assert_idle()


@pytest.mark.parametrize("values", [{}, {"presence_penalty": 0.5}], ids=["first token", "exact mode"])
async def test_a_request_that_cannot_be_written_into_a_message_ends_alone(tmp_path: Path, values: Any) -> None:
    """Its turn comes with a worker's message, whose reader must survive it."""
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0"].gate.clear()
        others = [await cluster.add(cluster.request(LONG)) for _ in range(2)]
        waits = await cluster.add(cluster.request(LONG, stop_token_ids=[1 << 70], **values))
        cluster["prefill-0"].gate.set()
        for collector in others:
            assert (await read(collector)).tokens[0] == generate(LONG, 5)
        told = await failure(cluster, waits)
        assert told.http_status == 400
        assert "cannot be sent to a worker" in str(told)
        await cluster.run(LONG)
        cluster.assert_idle()


async def test_a_prefill_worker_that_gave_up_is_free_while_the_decode_worker_goes_on_alone(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        prefill, decode = cluster["prefill-0"], cluster["decode-0"]
        prefill.close_gate_at = "started"
        collector = await cluster.add(cluster.request(LONG, presence_penalty=0.5))
        await until(lambda: decode.submitted)
        (leg,) = prefill.submitted
        await prefill.outputs(EngineCoreOutput(leg.request_id, [], finish_reason=FinishReason.ABORT))
        await until(lambda: cluster.flight.stage is Stage.HANDING_OVER)
        books = cluster.client.dispatcher.scheduler.books
        assert books.pools.prefill["prefill-0"].jobs == {}
        transfer = decode.submitted[0].sampling_params.extra_args["kv_transfer_params"]
        cluster.exchange.event(transfer["transfer_id"]).set()
        assert (await read(collector)).tokens[0] == generate(LONG, 5)
        assert books.held == {}
        assert books.pools.decode["decode-0"].num_running == 0
