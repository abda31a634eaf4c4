"""What a KV block is called between workers and the proxy: a number made of its tokens and of all before them.

Engines have hashes of their own, which depend on the vLLM version, its hash algorithm and its seed. These depend on
nothing but the text, so the proxy can compute them for a prompt and ask who holds it.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

import msgspec

HASH_BITS = 60
"""An int of more bits takes half as much memory again, and an index holds millions."""
_DIGEST_BYTES = 8
_SPARE_BITS = 8 * _DIGEST_BYTES - HASH_BITS
NO_PARENT = 0


@lru_cache
def _packed_tokens(block_size: int) -> Struct:
    return Struct(f"<{block_size}I")


def _number(parent: int, content: bytes) -> int:
    digest = blake2b(parent.to_bytes(_DIGEST_BYTES, "little") + content, digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little") >> _SPARE_BITS


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """The hash of a block of these tokens after the block `parent`, or after a root.

    Raises `struct.error` for numbers that are no token ids.
    """
    return _number(parent, _packed_tokens(len(token_ids)).pack(*token_ids))


def salted(parent: int, *salt: object) -> int:
    """A parent for blocks that count as different although their tokens are the same. `salt`: MessagePack data."""
    return _number(parent, b"salt" + msgspec.msgpack.encode(salt))


def root(adapter: int = 0, cache_salt: str = "") -> int:
    """The parent of a prompt's first block. `adapter`: number of the LoRA adapter, 0 for the base model."""
    return salted(NO_PARENT, adapter, cache_salt) if adapter or cache_salt else NO_PARENT
