"""How a frame is read; the proxy reads its workers' frames as ranks read each other's."""

from kvtransfer.wire import BadFrame, reader

__all__ = ["BadFrame", "reader"]
