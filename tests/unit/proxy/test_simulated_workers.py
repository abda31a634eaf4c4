"""Simulated workers against the real dispatcher, pool and front end; two of their processes live in this one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from vllm.lora.request import LoRARequest

from cluster.config import LivenessConfig, SimulationConfig, TransferConfig
from cluster.host import drain
from cluster.messages import EngineFacts
from cluster.simulated.engine.vocabulary import Vocabulary
from cluster.simulated.host import SimulatedWorker
from cluster.simulated.settings import SimulatedSettings, SimulatedWorkerName
from cluster.simulated.transfers.peer_exchange import PeerExchange
from proxy.scheduling.place import Policy
from proxy.scheduling.prompt_hashes import PromptHashes
from tests.unit.proxy.fake_worker import MODEL
from tests.unit.proxy.mini_cluster import MiniCluster, read, until

WORDS = tuple(range(100, 164))
PROMPT = list(range(1, 200))
SLOW_LINK: dict[str, Any] = {"speed": "modelled", "transfer_gb_per_s": 0.02, "decode_step_s": 0.001, "chunk_s": 0.001}
"""PROMPT takes three seconds."""


def answer_to(prompt: list[int], num_tokens: int) -> list[int]:
    return Vocabulary(WORDS, 0).continuation(prompt, num_tokens)


class SimulatedProcess:
    """Workers as `python -m cluster.simulated` runs them."""

    def __init__(self, directory: Path, name: str, worker_ids: list[str], **simulation: Any) -> None:
        given = {"speed": "instant", "eos_every": 0, "num_blocks": 64, "max_num_batched_tokens": 64, **simulation}
        self.settings = SimulatedSettings(
            name=name,
            workers=[SimulatedWorkerName(worker_id=i, role=i.split("-")[0]) for i in worker_ids],  # type: ignore[arg-type]
            proxy_address=f"ipc://{directory}/proxy",
            runtime_dir=directory,
            model=MODEL,
            max_model_len=1024,
            words=WORDS,
            simulation=SimulationConfig(**given),
            transfer=TransferConfig(peer_heartbeat_s=0.05, peer_lost_after_s=0.2),
            liveness=LivenessConfig(heartbeat_s=0.05, dead_after_s=5, proxy_lost_after_s=5),
            prefix_events=True,
            drain_timeout_s=10,
        )
        self.context = zmq.asyncio.Context()
        self.peers = PeerExchange(self.context, self.settings.peer_bind)
        self.stop = asyncio.Event()
        self.workers = [SimulatedWorker(w, self.settings, self.context, self.peers) for w in self.settings.workers]
        self.tasks = [asyncio.create_task(worker.run(self.stop)) for worker in self.workers]
        self.delivering = asyncio.create_task(self.peers.run())

    async def leave(self) -> list[int]:
        """SIGINT."""
        self.stop.set()
        codes = await asyncio.gather(*self.tasks)
        await self.kill()
        return codes

    async def kill(self) -> None:
        """SIGKILL: not a word to anybody."""
        for task in (*self.tasks, self.delivering):
            task.cancel()
        await asyncio.gather(*self.tasks, self.delivering, return_exceptions=True)
        for worker in self.workers:
            worker._line._socket.close(linger=0)
        if not self.context.closed:
            self.peers.close()
            self.context.term()


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.proxy = MiniCluster(f"ipc://{directory}/proxy", Policy(4, "local"), reserve_at_start=True)
        self.proxy.pool.roster.dead_after_s = 5
        self.processes: list[SimulatedProcess] = []

    async def start(self, name: str, *worker_ids: str, **simulation: Any) -> SimulatedProcess:
        process = SimulatedProcess(self.directory, name, list(worker_ids), **simulation)
        self.processes.append(process)
        alive = self.proxy.pool.roster
        await until(lambda: {w.worker_id for w in alive.alive()} >= set(worker_ids))
        await until(lambda: all(worker._line.proxy_epoch for worker in process.workers))
        return process

    def blocks(self) -> list[tuple[int, int, int]]:
        """Free, used and leased of every worker, as it says itself."""
        counts = [w._engine.block_count() for process in self.processes for w in process.workers]
        for count in counts:
            assert count.free + count.used + count.leased == count.total
        return [(count.free, count.used, count.leased) for count in counts]

    async def all_free(self) -> None:
        await until(lambda: all(used == leased == 0 for _, used, leased in self.blocks()))
        self.proxy.assert_idle()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for process in made.processes:
        await process.kill()
    await made.proxy.close()


async def test_a_prompt_crosses_and_the_answer_is_that_of_one_engine(cluster: Cluster) -> None:
    await cluster.start("a", "prefill-0", "prefill-1")
    await cluster.start("b", "decode-0", "decode-1")
    prompts = [[i, *PROMPT] for i in range(8)]
    answers = await asyncio.gather(*(cluster.proxy.run(prompt, max_tokens=20) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens[0] == answer_to(prompt, 20)
        assert answer.finish_reasons[0] == "length"
    assert cluster.proxy.metric("handovers_total", outcome="loaded") == 8
    assert cluster.proxy.metric("workers_simulated") == 4
    await cluster.all_free()


@pytest.mark.parametrize(
    "values", [{"seed": 3, "temperature": 1.0}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 3, "temperature": 1.0}]
)
async def test_every_kind_of_request_gets_what_it_asks_for(cluster: Cluster, values: dict[str, Any]) -> None:
    await cluster.start("a", "prefill-0", "decode-0")
    answer = await cluster.proxy.run(PROMPT, max_tokens=4, **values)
    assert all(tokens == answer_to(PROMPT, 4) for tokens in answer.tokens.values())
    assert len(answer.tokens) == values.get("n", 1)
    assert answer.num_logprobs[0] == (4 if "logprobs" in values else 0)
    if "prompt_logprobs" in values:
        scores = answer.outputs[0].prompt_logprobs
        assert scores is not None
        assert len(scores) == len(PROMPT)
    await cluster.all_free()


async def test_a_stop_token_ends_the_answer(cluster: Cluster) -> None:
    await cluster.start("a", "prefill-0", "decode-0")
    expected = answer_to(PROMPT, 10)
    answer = await cluster.proxy.run(PROMPT, max_tokens=10, stop_token_ids=[expected[3]])
    assert (answer.tokens[0], answer.finish_reasons[0]) == (expected[:4], "stop")
    await cluster.all_free()


async def test_an_exporter_killed_in_mid_transfer_costs_a_recompute(cluster: Cluster) -> None:
    exporter = await cluster.start("a", "prefill-0")
    await cluster.start("b", "decode-0", **SLOW_LINK)
    collector = await cluster.proxy.add(cluster.proxy.request(PROMPT, max_tokens=6))
    await until(lambda: cluster.blocks()[0][2] > 0)
    await exporter.kill()
    cluster.processes.remove(exporter)
    assert (await read(collector)).tokens[0] == answer_to(PROMPT, 6)
    assert cluster.proxy.metric("handover_failures_total", kind="peer_lost") == 1
    await cluster.all_free()


async def test_a_killed_importer_leaves_no_lease_behind(cluster: Cluster) -> None:
    await cluster.start("a", "prefill-0")
    importer = await cluster.start("b", "decode-0", **SLOW_LINK)
    collector = await cluster.proxy.add(cluster.proxy.request(PROMPT, max_tokens=6))
    await until(lambda: cluster.blocks()[0][2] > 0)
    await importer.kill()
    cluster.processes.remove(importer)
    cluster.proxy.pool.give_up("decode-0", "Worker decode-0 was killed by SIGKILL")
    await until(lambda: cluster.blocks()[0][1:] == (0, 0))
    with pytest.raises(Exception, match=r"decode-0 was killed|No decode worker is alive"):
        await read(collector)


async def test_an_aborted_request_frees_both_sides(cluster: Cluster) -> None:
    await cluster.start("a", "prefill-0", "decode-0", speed="modelled", decode_step_s=0.002, chunk_s=0.002)
    for wait_s in (0.0, 0.003, 0.006, 0.02):
        request = cluster.proxy.request([round(wait_s * 1e4), *PROMPT], max_tokens=500)
        await cluster.proxy.add(request)
        await asyncio.sleep(wait_s)
        await cluster.proxy.abort(request.request_id)
        await cluster.all_free()


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "SETTLE_S", 0.05)
    await cluster.start("a", "prefill-0", "decode-0")
    leaving = await cluster.start("b", "decode-1", speed="modelled", decode_step_s=0.004)
    requests = [cluster.proxy.request([i, *PROMPT], max_tokens=30) for i in range(4)]
    collectors = [await cluster.proxy.add(request) for request in requests]
    await until(lambda: leaving.workers[0]._engine.request_ids)
    assert leaving.workers[0].drain()
    assert not leaving.workers[0].drain()
    for request, collector in zip(requests, collectors, strict=True):
        assert (await read(collector)).tokens[0] == answer_to(request.prompt_token_ids or [], 30)
    assert await asyncio.wait_for(leaving.tasks[0], 5) == 0
    await until(lambda: "drained" in cluster.proxy.pool.roster.causes.get("decode-1", ""))


async def test_a_worker_that_is_told_to_stop_says_goodbye(cluster: Cluster) -> None:
    process = await cluster.start("a", "prefill-0", "decode-0")
    assert await process.leave() == [0, 0]
    await until(lambda: "told to stop" in cluster.proxy.pool.roster.causes.get("decode-0", ""))


async def test_engine_calls_are_answered(cluster: Cluster) -> None:
    await cluster.start("a", "decode-0")
    pool = cluster.proxy.pool
    await cluster.proxy.run(PROMPT)
    assert await pool.call_all("reset_prefix_cache") == {"decode-0": True}
    assert await pool.call_all("is_sleeping") == {"decode-0": False}


async def test_the_proxy_knows_what_the_prefix_cache_holds(cluster: Cluster) -> None:
    process = await cluster.start("a", "decode-0")
    index = cluster.proxy.pool.prefixes.index
    hashes = PromptHashes(PROMPT)
    await until(lambda: index.is_known("decode-0"))
    assert index.cached_tokens(hashes) == {}
    await cluster.proxy.run(PROMPT, max_tokens=2)
    await until(lambda: index.cached_tokens(hashes) == {"decode-0": len(PROMPT) // 16 * 16})
    process.workers[0]._line.cache.begin()
    await cluster.proxy.run([*PROMPT, 7, 8, 9], max_tokens=2)
    for kind in ("expected", "found"):
        assert cluster.proxy.metric("prefix_tokens_total", kind=kind) == len(PROMPT) // 16 * 16
    await cluster.proxy.pool.call_all("reset_prefix_cache")
    await until(lambda: index.cached_tokens(hashes) == {})


async def test_adapters_are_taken_by_name_and_their_blocks_are_others(cluster: Cluster) -> None:
    await cluster.start("a", "prefill-0", "decode-0")
    poet, pool = LoRARequest("poet", 1, "/adapters/poet"), cluster.proxy.pool
    await cluster.proxy.client.add_lora_async(poet)
    assert await pool.call_all("list_loras") == {name: [poet.lora_int_id] for name in ("prefill-0", "decode-0")}
    for adapter, cached in ((None, 0), (poet, 0), (poet, len(PROMPT) // 16 * 16)):
        request = cluster.proxy.request(PROMPT)
        request.lora_request = adapter
        assert (await read(await cluster.proxy.add(request))).cached_tokens == cached
    await pool.adapters.unload("poet")
    assert await pool.call_all("list_loras") == {"prefill-0": [], "decode-0": []}
    await cluster.all_free()


async def test_the_hello_says_that_there_is_no_engine(cluster: Cluster) -> None:
    await cluster.start("a", "decode-0")
    facts: EngineFacts = cluster.proxy.pool.roster.workers["decode-0"].hello.engine
    assert facts.simulated
    assert (facts.num_blocks, facts.max_num_batched_tokens) == (64, 64)
