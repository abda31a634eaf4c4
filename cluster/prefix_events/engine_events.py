"""vLLM's KV cache events, as far as they are read here. Never through pickle.

Relies on vLLM 0.32's `vllm/distributed/kv_events.py`: `ZmqEventPublisher` publishes (topic, 8 bytes of sequence number,
MessagePack of a `KVEventBatch`); asked with a sequence number it sends again what it still has, and then `END`. A test
compares these structs with vLLM's own.
"""

from typing import Annotated, Any

import msgspec

from cluster.frames import reader
from kvtransfer.wire import Count

END = b"\xff" * 8
"""In place of a sequence number: nothing more is sent again."""
MAX_BATCH_BYTES = 64 << 20
"""A step that caches 128,000 tokens makes a batch of less than 1 MiB."""

EngineHash = int | bytes
BlockSize = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """These blocks, each the child of the one before, can be found by later requests."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    """Of the block before the first; None: they begin a text."""
    token_ids: list[Count]
    block_size: BlockSize
    medium: str | None
    lora_name: str | None
    lora_id: Count | None = None
    """Of the adapter by name and path (`proxy.adapters.adapter`); the name alone does not tell two versions apart."""
    extra_keys: list[list[Any] | None] | None = None
    """Per block what else its hash depends on: LoRA name, (image, offset) pairs, cache salt (first block only)."""
    group_idx: Count | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """One copy of each of these blocks is gone."""

    block_hashes: list[EngineHash]
    medium: str | None
    group_idx: Count | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step, in their order."""

    ts: float
    events: list[EngineEvent]


read_batch = reader(msgspec.msgpack.Decoder[Batch](Batch), MAX_BATCH_BYTES)
"""Raises `BadFrame` and nothing else."""
