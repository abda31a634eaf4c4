"""Who has been given what: what placed requests hold at workers, until it is given back."""

from dataclasses import dataclass, field

from proxy.scheduling.capacity.costs import Caution, OutputLengths, prefill_work
from proxy.scheduling.capacity.pools import Pools
from proxy.scheduling.capacity.workers import DecodeWorker, Job, PrefillWorker
from proxy.scheduling.fitting import Fit
from proxy.scheduling.view import RequestShape
from proxy.scheduling.waiting.fair_queue import Entry


@dataclass(slots=True, eq=False)
class Held:
    """What one request holds. Workers that died or restarted since are others than those in the pools."""

    prefill: PrefillWorker | None = None
    decode: DecodeWorker | None = None
    blocks: int = 0
    running: bool = False
    """At the decode worker; False while its prompt is computed elsewhere."""
    computed: bool = False
    """Its prompt, wherever."""
    sent_s: float = 0.0
    """To a prefill worker."""
    predicted_s: float = 0.0
    """From then on, to its first token."""
    slo_class: str = ""
    overflow: bool = False
    """Its prompt is computed by a decode worker because prefill workers are busy."""


@dataclass(slots=True)
class Books:
    """Kept by `scheduler.Scheduler`."""

    pools: Pools
    lengths: OutputLengths = field(default_factory=OutputLengths)
    caution: Caution = field(default_factory=Caution)
    held: dict[str, Held] = field(default_factory=dict)
    """By request id."""

    def charge(self, entry: Entry, fit: Fit, now_s: float) -> None:
        """A request was placed."""
        held = Held(fit.prefill, fit.decode, fit.blocks, running=fit.prefill is None, overflow=fit.overflow)
        self.held[entry.request_id] = held
        if fit.prefill is not None and fit.job is not None:
            held.sent_s, held.predicted_s = now_s, fit.first_token_in_s
            held.slo_class = entry.shape.standing.slo.name
            fit.prefill.begin(entry.request_id, fit.job, now_s)
            self.pools.recent.add(fit.job.seconds, now_s)
            self.pools.prefill_changed(fit.prefill)
        if fit.decode is not None:
            fit.decode.take(held.blocks, entry.shape.standing.slo.itl_s, running=held.running)
            fit.decode.local_prefills += fit.overflow
            self.pools.decode_changed(fit.decode)

    def follow(self, request_id: str, shape: RequestShape, worker_id: str, now_s: float) -> bool:
        """A sibling runs where its prompt is, and only its answer takes room; False if there is none.

        Workers that are unknown are not charged.
        """
        worker = self.pools.life(worker_id)
        if isinstance(worker, PrefillWorker):
            work = prefill_work(1, shape.num_prompt_tokens - 1)
            urgency = ((1, shape.standing.priority), now_s)
            if not worker.takes(worker.queue_for(urgency, now_s)):
                return False
            self.held[request_id] = Held(worker, running=True)
            worker.begin(request_id, Job(urgency, work, worker.costs.seconds(work)), now_s)
            self.pools.prefill_changed(worker)
        elif isinstance(worker, DecodeWorker):
            blocks = worker.blocks_of(self.lengths.expected(shape.max_tokens) + 1)
            if not worker.has_room(blocks):
                return False
            self.held[request_id] = Held(None, worker, blocks, running=True)
            worker.take(blocks, shape.standing.slo.itl_s, running=True)
            self.pools.decode_changed(worker)
        else:
            self.held[request_id] = Held(running=True)
        return True

    def prompt_computed(self, request_id: str, now_s: float) -> bool:
        """The prefill of a request has ended where it was placed; False if that is known."""
        held = self.held.get(request_id)
        if held is None or held.computed:
            return False
        held.computed = True
        if held.predicted_s:
            self.caution.observe(held.slo_class, held.predicted_s, now_s - held.sent_s)
        self._end_prefill(request_id, held, now_s, computed=True)
        if held.decode is not None and not held.running:
            held.running = True
            held.decode.num_running += 1
        if held.decode is not None and held.overflow:
            held.overflow = False
            held.decode.local_prefills -= 1
        return True

    def prefill_given_up(self, request_id: str, now_s: float) -> bool:
        """Nothing of it is computed at its prefill worker any more: its decode worker goes on alone, or it has ended.

        False if that is known.
        """
        held = self.held.get(request_id)
        if held is None or held.prefill is None:
            return False
        held.computed = True
        self._end_prefill(request_id, held, now_s, computed=False)
        if held.decode is not None and not held.running:
            held.running = True
            held.decode.num_running += 1
        return True

    def release(self, request_id: str, now_s: float) -> None:
        """A request is over, or is placed anew."""
        held = self.held.pop(request_id, None)
        if held is None:
            return
        self._end_prefill(request_id, held, now_s, computed=False)
        if held.decode is not None:
            held.decode.give_back(held.blocks, running=held.running)
            held.decode.local_prefills -= held.overflow
            self.pools.decode_changed(held.decode)

    def _end_prefill(self, request_id: str, held: Held, now_s: float, *, computed: bool) -> None:
        worker, held.prefill = held.prefill, None
        if worker is None:
            return
        sample = worker.end(request_id, now_s, computed=computed)
        if sample is not None:
            for costs in (worker.costs, self.pools.average):
                costs.observe_prefill(*sample)
        self.pools.prefill_changed(worker)

    def report(self, worker_id: str, blocks_used: int, blocks_total: int) -> None:
        """A worker told how many blocks it has and how many are taken."""
        worker = self.pools.decode.get(worker_id)
        if worker is not None:
            worker.report(blocks_used, blocks_total)
            self.pools.decode_changed(worker)

    def stepped(self, worker_id: str, now_s: float, *, goes_on: bool) -> None:
        """Outputs of a step of a decode worker came."""
        worker = self.pools.decode.get(worker_id)
        if worker is not None:
            worker.stepped(now_s, goes_on=goes_on)
            self.pools.decode_changed(worker)
