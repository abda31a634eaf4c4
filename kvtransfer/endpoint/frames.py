"""Bytes of one frame to a message and back. Anything else than a known message is a `BadFrame`: dropped and counted."""

import msgspec

from kvtransfer.host_messages import FromRank, ToRank
from kvtransfer.messages import FromExporter, FromImporter
from kvtransfer.wire import BadFrame, reader

__all__ = ["MAX_CONTROL_BYTES", "BadFrame", "encode", "from_exporter", "from_host", "from_importer"]

MAX_CONTROL_BYTES = 4 << 20
"""Of any frame without block bytes; `Ready` for a million tokens in blocks of 16 takes a twelfth of it."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: FromImporter | FromExporter | FromRank) -> bytes:
    return _encoder.encode(message)


from_importer = reader(msgspec.msgpack.Decoder[FromImporter](FromImporter), MAX_CONTROL_BYTES)
from_exporter = reader(msgspec.msgpack.Decoder[FromExporter](FromExporter), MAX_CONTROL_BYTES)
from_host = reader(msgspec.msgpack.Decoder[ToRank](ToRank), MAX_CONTROL_BYTES)
