"""Fetches that wait to be served, round robin: each transfer has its turn, whatever its size."""

from collections import deque
from collections.abc import Callable

from kvtransfer.messages import Fetch


class FetchQueue:
    """By importer and transfer. `importer` is the ZMQ routing id of an importer's connection."""

    def __init__(self) -> None:
        self._fetches: dict[tuple[bytes, str], deque[Fetch]] = {}  # in the order they are served

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._fetches.values())

    def num_waiting(self, importer: bytes, transfer_id: str) -> int:
        """Of one transfer of an importer."""
        return len(self._fetches.get((importer, transfer_id), ()))

    def add(self, importer: bytes, fetch: Fetch) -> None:
        self._fetches.setdefault((importer, fetch.transfer_id), deque()).append(fetch)

    def has_any(self, can_serve: Callable[[bytes], bool]) -> bool:
        """Some can be served now; others may wait for their communicator."""
        return any(can_serve(importer) for importer, _ in self._fetches)

    def take(self, can_serve: Callable[[bytes], bool]) -> tuple[bytes, Fetch] | None:
        """The next one, of an importer that can be served now."""
        key = next((key for key in self._fetches if can_serve(key[0])), None)
        if key is None:
            return None
        queue = self._fetches.pop(key)
        fetch = queue.popleft()
        if queue:
            self._fetches[key] = queue  # behind the others
        return key[0], fetch

    def forget(self, transfer_id: str, importer: bytes | None = None) -> None:
        """Drops what one importer, or everybody, asked of a transfer."""
        for key in [key for key in self._fetches if key[1] == transfer_id and importer in (None, key[0])]:
            del self._fetches[key]

    def forget_importer(self, importer: bytes) -> None:
        """Drops everything that an importer asked for."""
        for key in [key for key in self._fetches if key[0] == importer]:
            del self._fetches[key]
