"""The prompts that a simulated worker fetches: what has arrived when, and how it ends. Pure; time is passed in.

Tokens are copied as soon as the exporter has computed them, one transfer after the other: a worker has one link.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.simulated.engine.events import ImportCancelled, ImportOpened, ImportPlaced
from cluster.simulated.transfers.exports import Letter
from cluster.simulated.transfers.messages import Held, Release, Wanted

LINK = "simulated"


@dataclass(frozen=True, slots=True)
class ClosedImport:
    """The end of an import."""

    transfer_id: str
    outcome: str
    """`loaded`, `recompute` or `cancelled`."""
    failure_kind: str
    first_token: int | None
    num_valid_tokens: int
    """From the beginning of the prompt on."""
    num_tokens: int
    bytes_moved: int
    attached_to_done_s: float
    done_to_loaded_s: float
    copy_s: float
    bytes_left_at_done: int


@dataclass(slots=True)
class _Import:
    opened: ImportOpened
    opened_s: float
    heard_s: float
    first_token: int | None = None
    num_cached: int | None = None
    """Tokens that are here without being fetched; None while no blocks are reserved."""
    num_ready: int = 0
    is_done: bool = False
    num_copied: int = 0
    """Tokens that are here when `copied_until_s` has come."""
    copied_until_s: float = 0.0
    done_s: float | None = None
    bytes_moved: int = 0
    bytes_left_at_done: int = 0
    copy_s: float = 0.0
    failure: str = ""


@dataclass(slots=True)
class Imports:
    """All imports of one worker."""

    address: str
    """Where exporters answer, and the life that they answer to."""
    epoch: str
    kv_bytes_per_token: int
    block_size: int
    peer_lost_after_s: float
    transfer_s: Callable[[int], float]
    closed: list[ClosedImport] = field(default_factory=list)
    """Taken by the caller."""
    bytes_in: int = 0
    copy_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    _imports: dict[str, _Import] = field(default_factory=dict)
    _link_free_s: float = 0.0

    def __len__(self) -> int:
        return len(self._imports)

    def engine_says(self, event: ImportOpened | ImportPlaced | ImportCancelled, now_s: float) -> list[Letter]:
        """What the engine did."""
        if isinstance(event, ImportOpened):
            transfer_id = event.order.transfer_id
            self._imports[transfer_id] = opened = _Import(event, now_s, now_s)
            return [self._wanted(transfer_id, opened)]
        found = self._imports.get(event.transfer_id)
        if found is None:
            return []
        if isinstance(event, ImportCancelled):
            return self._close(event.transfer_id, found, "cancelled")
        found.num_cached = found.num_copied = event.num_cached
        self._copy(found, now_s)
        return []

    def on_held(self, message: Held, now_s: float) -> None:
        """How far the exporter is."""
        found = self._imports.get(message.transfer_id)
        if found is None or found.failure:
            return
        found.heard_s = now_s
        if message.num_tokens < found.num_ready:
            # The exporter was preempted and computes the prompt again.
            found.num_copied = found.num_cached or 0
        found.num_ready = min(message.num_tokens, found.opened.num_tokens)
        is_news = message.is_done and not found.is_done
        if is_news:
            found.is_done, found.done_s = True, now_s
            if found.first_token is None:
                found.first_token = message.first_token
        self._copy(found, now_s)
        if is_news:
            left_s = max(0.0, found.copied_until_s - now_s)
            share = min(1.0, left_s / found.copy_s) if found.copy_s else 0.0
            found.bytes_left_at_done = int(share * found.bytes_moved)

    def on_failed(self, transfer_id: str, kind: str) -> None:
        """The exporter has nothing for us. That is no failure if all of it is here."""
        found = self._imports.get(transfer_id)
        if found is not None and not found.failure:
            found.failure = kind

    def on_first_token(self, transfer_id: str, token: int) -> None:
        """The proxy was faster than the exporter."""
        found = self._imports.get(transfer_id)
        if found is not None and found.first_token is None:
            found.first_token = token

    def ask_again(self, now_s: float) -> list[Letter]:
        """Every heartbeat: renews what is still wanted, and gives up exporters that do not answer."""
        letters = []
        for transfer_id, found in self._imports.items():
            if found.failure or (found.is_done and found.copied_until_s <= now_s and found.num_cached is not None):
                continue
            if now_s - found.heard_s > self.peer_lost_after_s:
                found.failure = "peer_lost"
            else:
                letters.append(self._wanted(transfer_id, found))
        return letters

    def close_what_ended(self, now_s: float) -> list[Letter]:
        """Puts imports that have ended into `closed`; returns what their exporters are told."""
        letters: list[Letter] = []
        for transfer_id, found in list(self._imports.items()):
            wants_token = found.opened.order.first_token and found.first_token is None
            if found.num_cached is None or wants_token:
                continue
            nothing_to_copy = found.num_cached >= found.opened.num_tokens
            if nothing_to_copy or (found.is_done and found.copied_until_s <= now_s):
                letters += self._close(transfer_id, found, "loaded")
            elif found.failure:
                letters += self._close(transfer_id, found, "recompute")
        return letters

    def next_arrival_s(self) -> float | None:
        """When the next transfer that only lacks the rest of its bytes is complete."""
        arrivals = [
            found.copied_until_s
            for found in self._imports.values()
            if found.is_done and found.num_cached is not None and not found.failure
        ]
        return min(arrivals, default=None)

    def _copy(self, found: _Import, now_s: float) -> None:
        """Puts what is ready and not here yet onto the link."""
        if found.num_cached is None or found.num_ready <= found.num_copied:
            return
        num_bytes = (found.num_ready - found.num_copied) * self.kv_bytes_per_token
        copy_s = self.transfer_s(num_bytes)
        self._link_free_s = max(now_s, self._link_free_s) + copy_s
        found.copied_until_s = self._link_free_s
        found.num_copied = found.num_ready
        found.bytes_moved += num_bytes
        found.copy_s += copy_s

    def _close(self, transfer_id: str, found: _Import, outcome: str) -> list[Letter]:
        del self._imports[transfer_id]
        opened, is_loaded = found.opened, outcome == "loaded"
        kind = "" if is_loaded else found.failure
        if kind:
            self.failures[kind] += 1
        loaded_s = max(0.0, found.copied_until_s - found.done_s) if is_loaded and found.done_s is not None else 0.0
        self.bytes_in += found.bytes_moved
        self.copy_s += found.copy_s
        self.closed.append(
            ClosedImport(
                transfer_id=transfer_id,
                outcome=outcome,
                failure_kind=kind,
                first_token=found.first_token if opened.order.first_token else None,
                # What came without a `done` may have been computed anew meanwhile: only the cached blocks count.
                num_valid_tokens=opened.num_tokens if is_loaded else found.num_cached or 0,
                num_tokens=opened.num_tokens,
                bytes_moved=found.bytes_moved,
                attached_to_done_s=0.0 if found.done_s is None else found.done_s - found.opened_s,
                done_to_loaded_s=loaded_s,
                copy_s=found.copy_s,
                bytes_left_at_done=found.bytes_left_at_done,
            )
        )
        return [(opened.order.address, Release(opened.order.epoch, transfer_id, found.bytes_moved, found.copy_s))]

    def _wanted(self, transfer_id: str, found: _Import) -> Letter:
        opened = found.opened
        message = Wanted(
            opened.order.epoch, transfer_id, opened.num_tokens, opened.prompt_state, self.address, self.epoch
        )
        return opened.order.address, message
