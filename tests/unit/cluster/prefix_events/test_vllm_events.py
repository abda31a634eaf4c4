"""vLLM's own publisher, events and cache manager against our reader."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq.asyncio
from vllm.distributed import kv_events
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from cluster.host import vllm_engine
from cluster.messages import CacheEvents
from cluster.prefix_events.block_hashes import NO_PARENT, block_hash, root
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.prefix_events.engine_events import BlockRemoved, BlockStored, read_batch
from cluster.prefix_events.relay import CacheRelay
from cluster.prefix_events.teller import CacheTeller

BLOCK = 4


def ours(tokens: list[int], parent: int = NO_PARENT) -> list[int]:
    chain = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = block_hash(parent, tokens[start : start + BLOCK])
        chain.append(parent)
    return chain


def test_every_field_that_is_read_means_what_vllm_says() -> None:
    stored = kv_events.BlockStored(
        [(1 << 64) - 1, b"bytes"], 7, [1, 2, 3, 4], 2, 3, "GPU", "poet", [("poet", ("image", 4)), None], 0, "kind", 9
    )
    removed = kv_events.BlockRemoved([5], "CPU", 1)
    payload = msgspec.msgpack.encode(kv_events.KVEventBatch(1.5, [stored, removed, kv_events.AllBlocksCleared()], 0))
    read_stored, read_removed, _ = read_batch(payload).events
    assert isinstance(read_stored, BlockStored)
    assert isinstance(read_removed, BlockRemoved)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(stored))
    assert msgspec.structs.asdict(read_stored) == {name: plain[name] for name in BlockStored.__struct_fields__}
    assert msgspec.structs.asdict(read_removed) == {"block_hashes": [5], "medium": "CPU", "group_idx": 1}


class Engine:
    """vLLM's cache manager with room for a few blocks; what it says is read by us."""

    def __init__(self, num_blocks: int) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config, max_model_len=100, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True,
            enable_kv_cache_events=True,
        )  # fmt: skip
        self.cached = CachedBlocks(BLOCK, num_blocks)

    def request(self, name: str, tokens: list[int], **more: Any) -> Request:
        hasher = get_request_block_hasher(BLOCK, sha256)
        return Request(name, tokens, SamplingParams(max_tokens=5), None, block_hasher=hasher, **more)

    def compute(self, request: Request) -> int:
        """Returns how many tokens were found in the cache."""
        found, num_found, _ = self.manager.get_computed_blocks(request)
        blocks = self.manager.allocate_slots(request, request.num_tokens - num_found, num_found, found)
        assert blocks is not None
        return int(num_found)

    def held(self) -> set[int]:
        payload = msgspec.msgpack.encode(kv_events.KVEventBatch(0.0, self.manager.take_events()))
        self.cached.apply(read_batch(payload).events)
        return set(self.cached.all_blocks())


@pytest.fixture
def engine() -> Engine:
    return Engine(num_blocks=7)  # one of them is vLLM's own


def test_an_engine_tells_what_later_requests_will_find(engine: Engine) -> None:
    text = list(range(1, 14))
    first = engine.request("first", text)
    engine.compute(first)
    assert engine.held() == set(ours(text))
    engine.manager.free(first)
    again = engine.request("again", text)
    assert engine.compute(again) == 12
    engine.manager.free(again)
    assert engine.held() == set(ours(text)), "what was found is not told again"
    other = engine.request("other", list(range(50, 66)))
    engine.compute(other)
    assert engine.held() == {*ours(text)[:2], *ours(list(range(50, 66)))}, "the end of the older text made room"
    engine.manager.free(other)
    assert engine.manager.reset_prefix_cache()
    assert engine.held() == set()
    assert engine.cached.known


def test_copies_of_a_block_are_told_one_by_one(engine: Engine) -> None:
    text = [1, 2, 3, 4, 5]
    twins = [engine.request(name, text) for name in ("a", "b")]
    for twin in twins:
        # Both start in one step, before either is found in the cache.
        engine.manager.allocate_slots(twin, len(text))
    assert engine.held() == set(ours(text))
    for twin in twins:
        engine.manager.free(twin)
    for blocks, held in (({1, 2}, set(ours(text))), ({3, 4}, set())):
        engine.manager.evict_blocks(blocks)
        assert engine.held() == held


def test_blocks_that_a_decode_worker_received_are_told_when_they_have_arrived(engine: Engine) -> None:
    text = list(range(1, 10))
    imported = engine.request("imported", text)
    engine.manager.allocate_slots(imported, 0, num_external_computed_tokens=len(text) - 1, delay_cache_blocks=True)
    assert engine.held() == set(), "they are still on their way"
    engine.manager.cache_blocks(imported, len(text) - 1)  # `Scheduler._update_waiting_for_remote_kv`
    assert engine.held() == set(ours(text))
    engine.manager.free(imported)
    assert engine.compute(engine.request("next turn", text)) == 8


def test_a_cache_salt_is_told_with_the_first_block(engine: Engine) -> None:
    text = list(range(1, 9))
    engine.compute(engine.request("salted", text, cache_salt="pepper"))
    assert engine.held() == set(ours(text, root(0, "pepper")))


def test_an_adapter_is_told_by_its_number_and_its_blocks_are_no_others() -> None:
    engine, text = Engine(num_blocks=20), list(range(1, 10))
    for name, path, number in (("poet", "/a", 7), ("poet", "/b", 8)):
        request = engine.request(path, text, lora_request=LoRARequest(name, number, path))
        assert engine.compute(request) == 0
        engine.manager.free(request)
    assert engine.compute(engine.request("base", text)) == 0
    assert engine.held() >= {*ours(text, root(7)), *ours(text, root(8)), *ours(text)}
    assert engine.compute(engine.request("again", text, lora_request=LoRARequest("poet", 8, "/b"))) == 8


def test_no_request_makes_the_engine_tell_again_what_it_found() -> None:
    params = SamplingParams(extra_args={"kv_cache_report_mode": "full", "other": 1})
    request = EngineCoreRequest("id", [1], None, params, None, 0.0, None, None, None)
    received = vllm_engine.Engine(None, None, ()).read_request(MsgpackEncoder().encode(request))
    assert received.sampling_params.extra_args == {"other": 1}


@contextmanager
def publisher_at(directory: Path, buffer_steps: int) -> Iterator[Any]:
    config = vllm_engine.cache_event_config(f"ipc://{directory}/events", f"ipc://{directory}/replay")
    config.buffer_steps = buffer_steps
    publisher = kv_events.EventPublisherFactory.create(config)
    try:
        yield publisher
    finally:
        publisher.shutdown()


@pytest.mark.parametrize("kept", [100, 2], ids=["kept", "gone"])
async def test_what_vllms_publisher_said_before_anybody_listened_is_fetched_or_unknown(
    tmp_path: Path, kept: int
) -> None:
    told: list[CacheEvents] = []
    with publisher_at(tmp_path, kept) as publisher, zmq.asyncio.Context() as context:
        for at in range(5):
            event = kv_events.BlockStored([at], at - 1 if at else None, [at] * BLOCK, BLOCK, None, "GPU", None)
            publisher.publish(kv_events.KVEventBatch(0.0, [event]))
        await asyncio.to_thread(publisher._event_queue.join)
        teller = CacheTeller("epoch", told.append)
        teller.begin()
        addresses = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
        running = asyncio.create_task(CacheRelay(context, *addresses, CachedBlocks(BLOCK, 100), teller).run())
        try:
            async with asyncio.timeout(5):
                while len(told) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        finally:
            running.cancel()
            await asyncio.wait([running])
    if kept > 5:
        chain = ours([token for at in range(5) for token in [at] * BLOCK])
        assert (set(told[1].stored), told[1].known, told[1].oddities) == (set(chain), True, {"replayed": 5})
    else:
        assert (told[1].stored, told[1].known) == ([], False)
        assert told[1].oddities == {"missed": 1, "replayed": 2, "orphaned": 2}
