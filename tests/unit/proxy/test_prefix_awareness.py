"""From a worker's message to what the proxy expects of its cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.messages import CacheEvents
from cluster.prefix_events.block_hashes import root
from proxy.legs.vllm_leg_requests import describe
from proxy.scheduling.prompt_hashes import PromptHashes
from tests.unit.proxy.fake_worker import BLOCK_SIZE, FakeWorker
from tests.unit.proxy.mini_cluster import PROMPT, mini_cluster, until

HASHES = list(PromptHashes(PROMPT).of_size(BLOCK_SIZE))


async def tell(worker: FakeWorker, seq: int, stored: list[int], **more: Any) -> None:
    await worker.say(CacheEvents(worker.epoch, seq, stored, [], **more))


async def test_expected_and_found_tokens_are_counted_where_the_cache_is_known(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await cluster.run()
        assert cluster.metric("prefix_tokens_total", kind="found") == 0, "nothing was expected, not even nothing"
        await tell(cluster["prefill-0"], 0, HASHES)
        await until(lambda: cluster.pool.prefixes.index.is_known("prefill-0"))
        await cluster.run()
        assert cluster.metric("prefix_tokens_total", kind="expected") == 32
        assert cluster.metric("prefix_tokens_total", kind="found") == 7, "what the fake engine says of every prompt"


async def test_a_worker_whose_messages_were_lost_is_asked_for_everything(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        worker = cluster["prefill-0"]
        await tell(worker, 0, HASHES[:1])
        await tell(worker, 5, HASHES[1:])
        await until(lambda: worker.cache_told_anew == 1)
        assert not cluster.pool.prefixes.index.is_known("prefill-0")
        await tell(worker, 0, HASHES)
        await until(lambda: cluster.pool.prefixes.index.is_known("prefill-0"))


async def test_a_silent_worker_keeps_its_blocks_and_one_that_ended_takes_them_along(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        await tell(cluster["prefill-0"], 0, HASHES)
        await until(lambda: cluster.metric("prefix_index_blocks") == 2)
        cluster.pool.unreachable("prefill-0")
        assert cluster.metric("prefix_index_blocks") == 2
        cluster.pool.give_up("prefill-0", "It was killed")
        assert cluster.metric("prefix_index_blocks") == 0


@pytest.mark.parametrize(
    "changes",
    [{"mm_features": ["an image"]}, {"prompt_embeds": object()}, {"params": {"prompt_logprobs": 1}}],
    ids=["images", "embeddings", "prompt logprobs"],
)
async def test_prompts_that_tokens_do_not_name_or_that_read_no_cache_are_not_looked_up(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with mini_cluster(tmp_path) as cluster:
        request = cluster.request(**changes.pop("params", {}))
        for name, value in changes.items():
            setattr(request, name, value)
        assert not describe(request).prompt_hashes


async def test_a_lora_and_a_salt_are_part_of_the_lookup(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path) as cluster:
        request = cluster.request()
        assert list(describe(request).prompt_hashes.of_size(BLOCK_SIZE)) == HASHES
        request.lora_request, request.cache_salt = SimpleNamespace(lora_int_id=7), "pepper"
        salted = PromptHashes(PROMPT, root(7, "pepper"))
        assert list(describe(request).prompt_hashes.of_size(BLOCK_SIZE)) == list(salted.of_size(BLOCK_SIZE))


async def test_prompts_go_to_the_prefill_worker_that_has_them_until_it_has_them_no_more(tmp_path: Path) -> None:
    async with mini_cluster(tmp_path, "prefill-0", "prefill-1", "decode-0") as cluster:
        second = cluster["prefill-1"]
        for worker, held in ((cluster["prefill-0"], []), (second, HASHES)):
            await tell(worker, 0, held)
        index = cluster.pool.prefixes.index
        await until(lambda: index.is_known("prefill-0") and index.is_known("prefill-1"))
        for _ in range(3):
            await cluster.run()
        assert (len(cluster["prefill-0"].submitted), len(second.submitted)) == (0, 3)
        await second.say(CacheEvents(second.epoch, 1, [], HASHES))
        await tell(cluster["prefill-0"], 1, HASHES)
        await until(lambda: index.cached_tokens(PromptHashes(PROMPT)) == {"prefill-0": 32})
        await cluster.run()
        assert (len(cluster["prefill-0"].submitted), len(second.submitted)) == (1, 3)
