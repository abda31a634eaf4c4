"""Bytes of one frame to a message and back. Anything else than a known message is a `BadFrame`: dropped and counted."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvtransfer.host_messages import FromRank, ToRank
from kvtransfer.messages import FromExporter, FromImporter

MAX_CONTROL_BYTES = 4 << 20
"""Of any frame without block bytes; `Ready` for a million tokens in blocks of 16 takes a twelfth of it."""


class BadFrame(ValueError):
    """A frame that no correct peer sends."""


Message = TypeVar("Message")


def _reader(decoder: msgspec.msgpack.Decoder[Message]) -> Callable[[bytes | memoryview], Message]:
    def read(frame: bytes | memoryview) -> Message:
        if len(frame) > MAX_CONTROL_BYTES:
            raise BadFrame(f"a control frame of {len(frame)} bytes; the limit is {MAX_CONTROL_BYTES}")
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"a frame of {len(frame)} bytes that is no message: {error}") from error

    return read


_encoder = msgspec.msgpack.Encoder()


def encode(message: FromImporter | FromExporter | FromRank) -> bytes:
    return _encoder.encode(message)


from_importer = _reader(msgspec.msgpack.Decoder[FromImporter](FromImporter))
from_exporter = _reader(msgspec.msgpack.Decoder[FromExporter](FromExporter))
from_host = _reader(msgspec.msgpack.Decoder[ToRank](ToRank))
