"""Keeps the prefix index true to what workers tell, and notices when they did not tell everything.

Whether a worker's cache is `known`, `unknown` or `off` is a state of its own: nobody may take missing events for an
empty cache.
"""

import logging
from typing import Literal

from cluster.messages import CacheEvents
from proxy.prefixes.prefix_metrics import PrefixMetrics
from proxy.scheduling.prefix_index import PrefixIndex
from proxy.scheduling.prompt_hashes import PromptHashes
from proxy.workers.roster import Worker

log = logging.getLogger("twinpool.proxy")

PrefixState = Literal["known", "unknown", "off"]

ASK_AGAIN_AFTER_S = 5.0
"""Telling everything anew takes a moment, in which what was on its way still arrives."""


class PrefixFeed:
    """Takes `CacheEvents`, one worker's in order."""

    def __init__(self, metrics: PrefixMetrics) -> None:
        self.index = PrefixIndex()
        self._metrics = metrics
        self._next_seq: dict[str, int] = {}
        """By worker. Absent: nothing counts until it starts from number 0."""
        self._asked_s: dict[str, float] = {}

    def state(self, worker: Worker) -> PrefixState:
        """What is known of a worker's prefix cache."""
        if not worker.hello.engine.prefix_events:
            return "off"
        return "known" if self.index.is_known(worker.worker_id) else "unknown"

    def take(self, worker: Worker, events: CacheEvents, now_s: float) -> bool:
        """True if the worker must be asked to tell everything anew."""
        worker_id, block_size = worker.worker_id, worker.hello.engine.block_size
        if events.seq != 0 and events.seq != self._next_seq.get(worker_id):
            asked = self._miss(worker, now_s)
            self._show(worker)
            return asked
        self._asked_s.pop(worker_id, None)
        self._next_seq[worker_id] = events.seq + 1
        was_known = self.index.is_known(worker_id)
        if events.known:
            self.index.known(worker_id, block_size)
        else:
            self.index.unknown(worker_id, block_size)
            if was_known or events.seq == 0:
                log.warning("prefix_cache_unknown worker=%s reason=the_worker_missed_events_of_its_engine", worker_id)
        if events.cleared or events.seq == 0:
            self.index.cleared(worker_id)
        self.index.removed(worker_id, events.removed)
        self.index.stored(worker_id, events.stored)
        self._metrics.told(worker_id, events)
        self._show(worker)
        return False

    def forget(self, worker_id: str) -> None:
        """This life of the worker has ended."""
        self.index.forget(worker_id)
        self._next_seq.pop(worker_id, None)
        self._asked_s.pop(worker_id, None)
        self._metrics.show(self.index.num_blocks, worker_id, False)

    def expected(self, worker_id: str, prompt: PromptHashes) -> int | None:
        """Tokens of a prompt that this worker will find in its cache; None if that is not known."""
        if not prompt or not self.index.is_known(worker_id):
            return None
        return self.index.cached_tokens_of(worker_id, prompt)

    def found(self, expected_tokens: int | None, found_tokens: int | None) -> None:
        """What came of it."""
        if expected_tokens is not None and found_tokens is not None:
            self._metrics.found(expected_tokens, found_tokens)

    def _miss(self, worker: Worker, now_s: float) -> bool:
        worker_id = worker.worker_id
        if self._next_seq.pop(worker_id, None) is not None:
            log.warning("prefix_events_missed worker=%s", worker_id)
            self.index.unknown(worker_id, worker.hello.engine.block_size)
            self.index.cleared(worker_id)
        if now_s - self._asked_s.get(worker_id, now_s - ASK_AGAIN_AFTER_S) < ASK_AGAIN_AFTER_S:
            return False
        self._asked_s[worker_id] = now_s
        return True

    def _show(self, worker: Worker) -> None:
        self._metrics.show(self.index.num_blocks, worker.worker_id, self.state(worker) == "unknown")
