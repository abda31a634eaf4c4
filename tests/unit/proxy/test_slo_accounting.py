"""Requests through fake workers: how each is counted, and where its time to the first token went."""

import asyncio
from pathlib import Path

import pytest
from vllm.exceptions import GracefulHTTPError

from proxy.middleware.request_context import CURRENT, RequestContext
from proxy.scheduling.slo import PROBE, SloClass, Standing
from tests.unit.proxy.mini_cluster import MiniCluster, mini_cluster, read, until

OUTCOMES = ("attained", "missed_ttft", "missed_itl", "missed_both", "rejected", "failed", "aborted")
PARTS = (
    "front_end", "proxy_queue", "lost_attempt", "prefill_queue", "prefill", "hand_off", "decode_queue", "first_step",
)  # fmt: skip
STEP_S = 0.02


def belongs_to(name: str, ttft_s: float = 30.0, itl_s: float = 30.0) -> None:
    """From here on, requests of this test are of this class."""
    CURRENT.set(RequestContext(Standing(SloClass(name, ttft_s, itl_s))))


def counted(cluster: MiniCluster, name: str = "gold") -> dict[str, int]:
    values = {each: cluster.metric("slo_requests_total", slo_class=name, outcome=each) for each in OUTCOMES}
    return {outcome: int(value) for outcome, value in values.items() if value}


def parts(cluster: MiniCluster) -> dict[str, float]:
    return {part: cluster.metric("ttft_part_seconds_sum", part=part) for part in PARTS}


async def test_answers_are_counted_by_what_they_attained(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        belongs_to("gold")
        await cluster.run()
        await cluster.run(n=2, temperature=0.8)
        assert counted(cluster) == {"attained": 2}, "choices of one answer count as one"
        assert cluster.metric("itl_seconds_count", slo_class="gold") == 12
        belongs_to("slow", ttft_s=1e-6, itl_s=1e-6)
        await cluster.run()
        assert counted(cluster, "slow") == {"missed_both": 1}


async def test_a_stop_string_is_an_answer_and_a_client_that_leaves_is_not(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        belongs_to("gold")
        cluster["decode-0"].step_s = 0.005
        left, stopped = cluster.request(max_tokens=400), cluster.request(max_tokens=400)
        await cluster.add(left)
        await cluster.abort(left.request_id)
        process = cluster.front_end.process_outputs

        def find_stop(outputs: object, *rest: object) -> object:
            # What vLLM's output processor finds in the text it returns from the task that reads outputs.
            processed = process(outputs, *rest)
            cluster.front_end.abort_requests([stopped.request_id], internal=True)
            processed.reqs_to_abort.append(stopped.request_id)
            return processed

        cluster.front_end.process_outputs = find_stop
        await cluster.add(stopped)
        await until(lambda: counted(cluster) == {"attained": 1, "aborted": 1})
        assert len(cluster.client.dispatcher.scheduler.books.lengths._recent) == 1, "how long answers get"
        cluster.assert_idle()


async def test_who_no_worker_ever_had_is_rejected_and_the_rest_has_failed(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "decode-0", on_no_prefill="reject") as cluster:
        belongs_to("gold")
        with pytest.raises(GracefulHTTPError):
            await cluster.run()
        assert counted(cluster) == {"rejected": 1}
        assert cluster.metric("requests_rejected_total", slo_class="gold", reason="no_prefill_worker") == 1
        cluster["decode-0"].gate.clear()
        lost = await cluster.add(cluster.request(prompt=[5, 6], n=2, temperature=0.8))
        await until(lambda: len(cluster["decode-0"].submitted) == 2)
        cluster.pool.give_up("decode-0", "Worker decode-0 died")
        with pytest.raises(GracefulHTTPError):
            await read(lost)
        assert counted(cluster) == {"rejected": 1, "failed": 1}
        with pytest.raises(GracefulHTTPError):
            await cluster.run(n=3, temperature=0.8)
        assert counted(cluster) == {"rejected": 2, "failed": 1}, "refused at once or later, it is one request"
        assert cluster.metric("requests_rejected_total", slo_class="gold", reason="no_decode_worker") == 1


@pytest.mark.parametrize(
    ("kind", "longest"),
    [("remote", "prefill"), ("exact", "first_step"), ("local", "prefill")],
)
async def test_parts_add_up_and_the_slow_one_is_the_longest(tmp_path: Path, kind: str, longest: str) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["prefill-0" if kind == "remote" else "decode-0"].step_s = 3 * STEP_S
        params = {"presence_penalty": 0.5} if kind == "exact" else {}
        await cluster.run(prompt=[5, 6] if kind == "local" else None, max_tokens=2, **params)
        told, total_s = parts(cluster), cluster.metric("ttft_seconds_sum")
        assert sum(told.values()) == pytest.approx(total_s, rel=0.01)
        assert total_s >= 3 * STEP_S
        assert max(told, key=told.__getitem__) == longest
        assert told[longest] >= 2 * STEP_S


async def test_the_hand_off_gap_is_told_in_parts_that_add_up(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        cluster["decode-0"].step_s = STEP_S
        await cluster.run(max_tokens=3)
        told = [
            cluster.metric("second_token_part_seconds_sum", part=part)
            for part in ("hand_off", "decode_queue", "decode_step")
        ]
        assert sum(told) == pytest.approx(cluster.metric("handover_gap_seconds_sum"), rel=0.01)
        assert told[2] >= STEP_S / 2


async def test_the_proxys_own_requests_leave_no_trace_in_what_clients_got(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        CURRENT.set(RequestContext(Standing(PROBE)))
        await cluster.run()
        assert cluster.metric("ttft_seconds_count") == 0
        assert cluster.metric("itl_seconds_count", slo_class="probe") == 0
        assert counted(cluster, "probe") == {}
        assert cluster.client.dispatcher.recent.last is None
        await asyncio.sleep(0)
        cluster.assert_idle()
