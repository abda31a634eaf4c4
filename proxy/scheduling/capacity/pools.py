"""All workers of both roles, kept in the order in which they are asked, so that nobody is asked in vain."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice

from proxy.scheduling.capacity.costs import CostModel
from proxy.scheduling.capacity.workers import RECENT_S, DecodeWorker, PrefillWorker, Recent
from proxy.scheduling.place import Policy
from proxy.scheduling.view import NO_ADAPTERS, AdapterView, Role, WorkerFacts

CERTAIN = 2.0
"""Standard errors by which a worker must have done more than its part before that counts."""
MAX_BUSY = 0.9
"""What is begun within a minute may be more than a minute's work."""
ASKED = 4
"""Prefill workers that are asked about a request: so many that will be free first, and as many that know its prompt."""


@dataclass(slots=True)
class Pools:
    """The workers that take requests now."""

    policy: Policy
    average: CostModel = field(init=False)
    """Of no worker in particular: how long work takes before it is known who does it."""
    prefill: dict[str, PrefillWorker] = field(default_factory=dict)
    decode: dict[str, DecodeWorker] = field(default_factory=dict)
    recent: Recent = field(default_factory=Recent)
    """Of all prefill workers that there were."""
    prefill_lens: tuple[int, ...] = ()
    """Different context lengths of the prefill workers, shortest first."""
    decode_lens: tuple[int, ...] = ()
    awaited: frozenset[Role] = frozenset()
    """Roles of which workers will come or come back."""
    adapters: AdapterView = NO_ADAPTERS
    _compatible: frozenset[tuple[str, str]] = frozenset()
    _partners: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By the layout of a prefill worker: those of decode workers that it can hand over to."""
    _prefill_order: list[tuple[bool, float, int]] = field(default_factory=list)
    _prefill_by_index: dict[int, PrefillWorker] = field(default_factory=dict)
    _decode_order: dict[str, list[tuple[int, int, float, int]]] = field(default_factory=dict)
    """By layout."""
    _decode_by_index: dict[int, DecodeWorker] = field(default_factory=dict)
    _learned: dict[str, CostModel] = field(default_factory=dict)
    """By worker id: a restarted worker is as fast as it was."""
    _away: dict[str, PrefillWorker | DecodeWorker] = field(default_factory=dict)
    """Lives that take no requests now. A drain that is called off brings them back with what they still carry."""

    def __post_init__(self) -> None:
        self.average = CostModel(self.policy.prior_prefill_tokens_per_s, self.policy.prior_decode_step_s)

    # ----------------------------------------------------------------------------------------------- membership

    def become(
        self,
        workers: Iterable[WorkerFacts],
        compatible: frozenset[tuple[str, str]],
        awaited: frozenset[Role],
        adapters: AdapterView,
    ) -> bool:
        """Exactly these take requests from now on; False if that changes nothing.

        `compatible`: layouts of prefill and decode workers that differ and can exchange blocks all the same; `awaited`:
        roles of which workers will come or come back; `adapters`: who has which.
        """
        before = (self._compatible, self.awaited, self.adapters)
        self._compatible, self.awaited, self.adapters = compatible, awaited, adapters
        wanted = {facts.worker_id: facts for facts in workers}
        known = [w.facts for w in self.prefill.values()] + [w.facts for w in self.decode.values()]
        gone = [facts for facts in known if wanted.get(facts.worker_id) != facts]
        for facts in gone:
            self._leave(facts.worker_id)
        new = [f for f in wanted.values() if f.worker_id not in self.prefill and f.worker_id not in self.decode]
        for facts in new:
            self._join(facts)
        if not gone and not new and before == (compatible, awaited, adapters):
            return False
        self._membership_changed()
        return True

    def _join(self, facts: WorkerFacts) -> None:
        untried = CostModel(self.policy.prior_prefill_tokens_per_s, self.policy.prior_decode_step_s, self.average)
        costs = self._learned.setdefault(facts.worker_id, untried)
        former = self._away.pop(facts.worker_id, None)
        if former is not None and former.facts != facts:
            former = None
        if facts.role == "prefill":
            prefill = former if isinstance(former, PrefillWorker) else PrefillWorker(facts, costs)
            self.prefill[facts.worker_id] = self._prefill_by_index[facts.index] = prefill
            prefill.listed = prefill.order
            insort(self._prefill_order, prefill.listed)
        else:
            decode = former if isinstance(former, DecodeWorker) else DecodeWorker(facts, costs, facts.num_blocks)
            self.decode[facts.worker_id] = self._decode_by_index[facts.index] = decode
            decode.listed = decode.order
            insort(self._decode_order.setdefault(facts.fingerprint, []), decode.listed)

    def _leave(self, worker_id: str) -> None:
        prefill = self.prefill.pop(worker_id, None)
        if prefill is not None:
            self._away[worker_id] = prefill
            del self._prefill_by_index[prefill.facts.index]
            del self._prefill_order[bisect_left(self._prefill_order, prefill.listed)]
        decode = self.decode.pop(worker_id, None)
        if decode is not None:
            self._away[worker_id] = decode
            del self._decode_by_index[decode.facts.index]
            order = self._decode_order[decode.facts.fingerprint]
            del order[bisect_left(order, decode.listed)]
            if not order:
                del self._decode_order[decode.facts.fingerprint]

    def _membership_changed(self) -> None:
        self.prefill_lens = tuple(sorted({w.facts.max_model_len for w in self.prefill.values()}))
        self.decode_lens = tuple(sorted({w.facts.max_model_len for w in self.decode.values()}))
        self._partners = {
            layout: tuple(other for other in self._decode_order if self._fits(layout, other))
            for layout in {w.facts.fingerprint for w in self.prefill.values()}
        }

    def _fits(self, prefill_layout: str, decode_layout: str) -> bool:
        return prefill_layout == decode_layout or (prefill_layout, decode_layout) in self._compatible

    def life(self, worker_id: str) -> PrefillWorker | DecodeWorker | None:
        """The present or last life of a worker, also of one that takes no new requests."""
        return self.prefill.get(worker_id) or self.decode.get(worker_id) or self._away.get(worker_id)

    # ------------------------------------------------------------------------------------------------- asking

    def lens_with(self, adapter: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`prefill_lens` and `decode_lens` of the workers that have the adapter; 0: of all."""
        if not adapter:
            return self.prefill_lens, self.decode_lens
        allows = self.adapters.allows
        prefill = {w.facts.max_model_len for w in self.prefill.values() if allows(w.facts.worker_id, adapter)}
        decode = {w.facts.max_model_len for w in self.decode.values() if allows(w.facts.worker_id, adapter)}
        return tuple(sorted(prefill)), tuple(sorted(decode))

    def can_hand_over(self, needed: int, adapter: int = 0) -> bool:
        """Whether some prefill worker can hand a context of `needed` tokens over to some decode worker."""
        if len(self.prefill_lens) == len(self.decode_lens) == 1 and not adapter:
            return any(self._partners.values())
        decode_layouts = {w.facts.fingerprint for w in self.decode.values() if self._accepts(w.facts, needed, adapter)}
        return any(
            not decode_layouts.isdisjoint(self._partners[w.facts.fingerprint])
            for w in self.prefill.values()
            if self._accepts(w.facts, needed, adapter)
        )

    def _accepts(self, facts: WorkerFacts, needed: int, adapter: int) -> bool:
        return facts.max_model_len >= needed and self.adapters.allows(facts.worker_id, adapter)

    def shortest_context(self, needed: int) -> int:
        """Of all workers that accept `needed` tokens."""
        return min((n for n in (*self.prefill_lens, *self.decode_lens) if n >= needed), default=0)

    def prefill_candidates(
        self, needed: int, knowing: Mapping[str, int], avoid: str = "", *, hands_over: bool = False, adapter: int = 0
    ) -> list[PrefillWorker]:
        """Those that will be free first, and those that have most of the prompt; only such as accept the tokens.

        `knowing`: tokens of the prompt that workers have. `avoid`: a worker that takes nobody's place among them.
        `hands_over`: only those with a layout that fits some decode worker's. `adapter`: only those that have it.
        """

        def will_do(worker: PrefillWorker) -> bool:
            facts = worker.facts
            return self._accepts(facts, needed, adapter) and not (hands_over and not self._partners[facts.fingerprint])

        in_order = (self._prefill_by_index[index] for _, _, index in self._prefill_order)
        asked = {w.facts.worker_id: w for w in islice(filter(will_do, in_order), ASKED + bool(avoid))}
        # Decode workers know prompts too, and must not take the places of those that are asked.
        known = [w for w in (self.prefill.get(worker_id) for worker_id in knowing) if w is not None and will_do(w)]
        if len(known) > ASKED:
            known = nlargest(ASKED, known, key=lambda worker: knowing[worker.facts.worker_id])
        asked.update((worker.facts.worker_id, worker) for worker in known)
        return list(asked.values())

    def decode_for(
        self, needed: int, num_tokens: int, prefill: PrefillWorker | None = None, avoid: str = "", adapter: int = 0
    ) -> DecodeWorker | None:
        """The best decode worker with room for `num_tokens`, that accepts `needed`, fits `prefill`, has the adapter.

        `avoid`: a worker that is taken only if no other has room now.
        """
        layouts = tuple(self._decode_order) if prefill is None else self._partners[prefill.facts.fingerprint]
        best: DecodeWorker | None = None
        avoided: DecodeWorker | None = None
        for layout in layouts:
            for place in self._decode_order[layout]:
                if best is not None and best.listed < place:
                    break
                worker = self._decode_by_index[place[-1]]
                if not worker.has_room(worker.blocks_of(num_tokens)) or not self._accepts(
                    worker.facts, needed, adapter
                ):
                    continue
                if worker.facts.worker_id != avoid:
                    best = worker
                    break
                avoided = worker
        return best or avoided

    def excess_s(self, worker: PrefillWorker, now_s: float) -> float:
        """Recent work of a prefill worker beyond its part, as far as that is no chance."""
        part_s = self.recent.now(now_s) / max(1, len(self.prefill))
        return max(0.0, worker.recent.now(now_s) - part_s - CERTAIN * worker.recent.chance_s(now_s))

    def others_wait(self, now_s: float) -> float:
        """Seconds that prompts that come later will wait in sum, for each second that a prefill worker computes.

        In a queue that is busy for a share b of the time that is about b / (1 - b): nothing while the pool is idle, so
        that only the request's own time counts then.
        """
        busy = min(MAX_BUSY, self.recent.now(now_s) / (RECENT_S * max(1, len(self.prefill))))
        return busy / (1 - busy)

    # ----------------------------------------------------------------------------------------------- reordering

    def hands_over(self, within_s: float, now_s: float) -> bool:
        """Some prompt may be computed within so many seconds, so that a request joins a decode worker."""
        return any(worker.may_end(within_s, now_s) for worker in self.prefill.values())

    def prefill_changed(self, worker: PrefillWorker) -> None:
        """Its work changed."""
        if self.prefill.get(worker.facts.worker_id) is worker and worker.listed != worker.order:
            del self._prefill_order[bisect_left(self._prefill_order, worker.listed)]
            worker.listed = worker.order
            insort(self._prefill_order, worker.listed)

    def decode_changed(self, worker: DecodeWorker) -> None:
        """Its requests or its speed changed."""
        if self.decode.get(worker.facts.worker_id) is worker and worker.listed != worker.order:
            order = self._decode_order[worker.facts.fingerprint]
            del order[bisect_left(order, worker.listed)]
            worker.listed = worker.order
            insort(order, worker.listed)
