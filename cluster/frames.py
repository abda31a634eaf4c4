"""How a frame is read, and the bounds of its numbers; the proxy reads its peers' frames as ranks read each other's."""

from kvtransfer.wire import BadFrame, Count, Seconds, Size, reader

__all__ = ["BadFrame", "Count", "Seconds", "Size", "reader"]
