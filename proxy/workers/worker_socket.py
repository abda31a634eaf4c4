"""The proxy's one socket to its workers."""

from collections.abc import Callable, Sequence

import msgspec
import zmq

from cluster import messages
from cluster.trust import ClusterKey
from proxy.peer_socket import Frame, PeerSocket, SocketAddressError

__all__ = ["Frame", "SocketAddressError", "WorkerSocket"]


class WorkerSocket(PeerSocket[messages.FromWorker]):
    """Speaks `cluster.messages`; frames of an engine's outputs follow `Outputs`."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, messages.FromWorker, Sequence[zmq.Frame]], None],
        on_bad_frame: Callable[[bytes, str], None],
        key: ClusterKey | None = None,
    ) -> None:
        decoder = msgspec.msgpack.Decoder[messages.FromWorker](messages.FromWorker)
        super().__init__(address, "workers", decoder, messages.Outputs, on_message, on_bad_frame, key)
