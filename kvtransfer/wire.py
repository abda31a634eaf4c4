"""What every frame on every socket is held to: numbers within bounds, sizes within limits, a known message or nothing.

Anything else is a `BadFrame`, which the owner of the socket drops and counts.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Also an id of a block or a token, a rank, a process id."""
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Bytes, an address, or a counter that never ends."""
Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""A duration or a time of a monotonic clock. NaN is out of bounds, infinity is not."""


class BadFrame(ValueError):
    """A frame that no correct peer sends."""


Message = TypeVar("Message")


def reader(
    decoder: msgspec.msgpack.Decoder[Message], max_bytes: int | None = None
) -> Callable[[bytes | memoryview], Message]:
    """Reads one frame; raises BadFrame and nothing else, whatever is in it."""

    def read(frame: bytes | memoryview) -> Message:
        if max_bytes is not None and len(frame) > max_bytes:
            raise BadFrame(f"a control frame of {len(frame)} bytes; the limit is {max_bytes}")
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"a frame of {len(frame)} bytes that is no message: {error}") from error

    return read
