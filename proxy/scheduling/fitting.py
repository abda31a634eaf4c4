"""Which workers take a request now, given which way it can go."""

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.scheduling.capacity.costs import OutputLengths, prefill_work
from proxy.scheduling.capacity.pools import Pools
from proxy.scheduling.capacity.workers import DecodeWorker, Job, PrefillWorker, Urgency
from proxy.scheduling.place import Local, PrefillOnly, Remote
from proxy.scheduling.route import Route
from proxy.scheduling.slo import PROBE
from proxy.scheduling.view import RequestShape
from proxy.scheduling.waiting.fair_queue import Entry

SAME_S = 2
"""Digits: of prefill workers that are within 10 ms of each other the one that is idle for longest is taken."""
TOLERATED_EIGHTHS = 2
"""A prompt is followed to the decode worker that has it cached only if that is not this much fuller than the best."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A place, and what it takes there."""

    placement: Local | PrefillOnly | Remote
    prefill: PrefillWorker | None
    decode: DecodeWorker | None
    job: Job | None
    blocks: int
    first_token_in_s: float
    """From now on."""
    alone_s: float
    """The same if the worker had nothing else to do."""
    overflow: bool = False
    """The decode worker computes the prompt only because prefill workers are busy."""


@dataclass(frozen=True, slots=True)
class NoFit:
    """Nobody takes it now."""

    reason: str
    first_token_in_s: float
    """At least: once it is its turn."""
    alone_s: float
    reroute: bool = False
    """The worker it was meant for will not do: choose its way again without regard to caches."""


@dataclass(slots=True)
class _Offer:
    """One prefill worker's."""

    key: float
    """Less is better: when the first token comes, and how long others will wait because of what is computed for it.
    What is cached counts less at a worker that has done more than its part, so that what all prompts begin with does
    not draw all of them to one worker."""
    first_token_in_s: float
    ahead_s: float
    prefill_s: float
    cached: int
    worker: PrefillWorker
    takes: bool
    avoided: bool
    """The request was just lost under it: it comes last."""


def fit(
    pools: Pools,
    lengths: OutputLengths,
    way: Route,
    entry: Entry,
    cached: Mapping[str, int],
    now_s: float,
    caution: float = 1.0,
) -> Fit | NoFit:
    """`cached`: tokens of the prompt that workers have. `caution`: by how much predictions are stretched before a
    request counts as in time. The same arguments always give the same answer."""
    # Engines refuse to start unless one request of the greatest length fits.
    longest = max(entry.shape.num_prompt_tokens, *pools.decode_lens, 0)
    expected = min(entry.shape.num_prompt_tokens + lengths.expected(entry.shape.max_tokens), longest)
    match way:
        case Local(worker_id, _):
            return _local(pools, way, entry.shape, expected, cached.get(worker_id, 0))
        case PrefillOnly() | Remote():
            return _through_prefill(pools, way, entry, expected, cached, now_s, caution)
        case _:
            return NoFit(way.reason, 0.0, 0.0)


def _local(pools: Pools, way: Local, shape: RequestShape, expected: int, cached: int) -> Fit | NoFit:
    needed = shape.num_prompt_tokens + 1
    best = pools.decode_for(needed, expected, avoid=shape.avoid, adapter=shape.adapter)
    missing = max(1, shape.num_prompt_tokens - cached)
    worker = best
    if way.decode:
        worker = pools.decode.get(way.decode)
        if best is None or worker is None or worker.order[0] > best.order[0] + TOLERATED_EIGHTHS:
            return NoFit("decode_full", 0.0, 0.0, reroute=True)
        if not worker.has_room(worker.blocks_of(expected)):
            return NoFit("decode_full", 0.0, 0.0, reroute=True)
    if worker is None:
        alone_s = pools.average.prefill_s(missing, cached)
        return NoFit("decode_full", alone_s, alone_s)
    prefill_s = pools.average.prefill_s(missing, cached)
    placement = Local(worker.facts.worker_id, way.reason)
    return Fit(placement, None, worker, None, worker.blocks_of(expected - cached), prefill_s, prefill_s)


def _through_prefill(
    pools: Pools,
    way: PrefillOnly | Remote,
    entry: Entry,
    expected: int,
    cached: Mapping[str, int],
    now_s: float,
    caution: float,
) -> Fit | NoFit:
    shape, needed = entry.shape, entry.shape.num_prompt_tokens + 1
    urgency: Urgency = (entry.rank, entry.deadline_s)
    offers = sorted(
        (
            _offer(pools, worker, urgency, shape, cached, now_s)
            for worker in pools.prefill_candidates(
                needed, cached, shape.avoid, hands_over=isinstance(way, Remote), adapter=shape.adapter
            )
        ),
        key=lambda offer: (offer.avoided, round(offer.key, SAME_S), offer.worker.listed),
    )
    if not offers:
        return NoFit("no_prefill_worker", 0.0, 0.0)
    if isinstance(way, Remote) and (spill := _overflow(pools, entry, expected, offers, caution, now_s)) is not None:
        return spill
    reason, full_for = "prefill_full", set[str]()
    is_settled = _is_settled(offers)
    for offer in offers:
        layout = offer.worker.facts.fingerprint
        takes = offer.takes or (is_settled and offer is offers[0])
        if not takes or layout in full_for:
            continue
        decode = None
        if isinstance(way, Remote):
            decode = pools.decode_for(needed, expected, offer.worker, shape.avoid, shape.adapter)
            if decode is None:
                reason = "decode_full"
                full_for.add(layout)  # whoever prefills: looking through 256 full workers takes a while
                continue
        return _fit(way, shape, offer, decode, expected, cached, urgency)
    best = min(offers, key=lambda offer: offer.first_token_in_s)
    return NoFit(reason, best.first_token_in_s, best.prefill_s)


def _offer(
    pools: Pools,
    worker: PrefillWorker,
    urgency: Urgency,
    shape: RequestShape,
    cached: Mapping[str, int],
    now_s: float,
) -> _Offer:
    ahead, num_tokens = worker.queue_for(urgency, now_s), shape.num_prompt_tokens
    # The last token is always computed: somebody has to sample.
    have = min(cached.get(worker.facts.worker_id, 0), num_tokens - 1) if cached else 0
    prefill_s = worker.costs.prefill_s(num_tokens - have, have)
    in_s = ahead.seconds + prefill_s
    key = in_s
    if cached:
        # Without caches all compute the same, and whoever is free first is best.
        price = 1.0 + pools.others_wait(now_s)
        key = ahead.seconds + price * prefill_s
        if have:
            saved_s = price * (worker.costs.prefill_s(num_tokens) - prefill_s)
            key += min(saved_s, pools.excess_s(worker, now_s))
    avoided = worker.facts.worker_id == shape.avoid
    return _Offer(key, in_s, ahead.seconds, prefill_s, have, worker, worker.takes(ahead), avoided)


def _is_settled(offers: list[_Offer]) -> bool:
    """Whether the first offer would be the best even if everybody else were idle, for what it has cached: then nothing
    is gained by leaving open for longer where the request goes."""
    best = offers[0]
    if not best.cached or len(offers) == 1 or not best.worker.has_seat:
        return False
    return all(best.key < offer.key - offer.ahead_s for offer in offers[1:])


def _fit(
    way: PrefillOnly | Remote,
    shape: RequestShape,
    offer: _Offer,
    decode: DecodeWorker | None,
    expected: int,
    cached: Mapping[str, int],
    urgency: Urgency,
) -> Fit:
    worker_id = offer.worker.facts.worker_id
    placement: PrefillOnly | Remote = PrefillOnly(worker_id, way.reason)
    blocks = 0
    if decode is not None:
        placement = Remote(worker_id, decode.facts.worker_id, way.reason)
        blocks = decode.blocks_of(expected - cached.get(decode.facts.worker_id, 0))
    work = prefill_work(shape.num_prompt_tokens - offer.cached, offer.cached)
    job = Job(urgency, work, offer.prefill_s, shape.standing.slo.longest_step_s)
    return Fit(placement, offer.worker, decode, job, blocks, offer.first_token_in_s, offer.prefill_s)


def _overflow(
    pools: Pools, entry: Entry, expected: int, offers: list[_Offer], caution: float, now_s: float
) -> Fit | None:
    """A decode worker computes the prompt because prefill workers are busy, if that takes it less than half the wait
    for one of them (its time is everybody's), and if everybody's gap between tokens stays within its target.

    So the prompt must fit between two steps. Or, if the first token would be late otherwise, some steps take a chunk of
    it each; it must be in time then, and nobody may be handed over meanwhile, who would have to wait for one long step
    and then for another. One prompt at a time, and never a probe, which is there to go through both pools.
    """
    shape = entry.shape
    ahead_s = min(offer.ahead_s for offer in offers if offer.avoided == offers[0].avoided)
    if ahead_s <= 0.0 or shape.standing.slo.name == PROBE.name:
        return None
    worker = pools.decode_for(shape.num_prompt_tokens + 1, expected, avoid=shape.avoid, adapter=shape.adapter)
    prefill_s = pools.average.prefill_s(shape.num_prompt_tokens)
    if worker is None or worker.local_prefills or 2 * prefill_s >= ahead_s:
        return None
    itl_s, left_s = shape.standing.slo.itl_s, (entry.deadline_s - now_s) / caution
    if prefill_s <= worker.spare_s(itl_s):
        in_s, reason = prefill_s, "prefill_busy"
    elif (
        min(offer.first_token_in_s for offer in offers) > left_s
        and (in_s := worker.in_chunks_s(prefill_s, itl_s)) <= left_s
        and not pools.hands_over(in_s, now_s)
    ):
        reason = "prefill_late"
    else:
        return None
    placement = Local(worker.facts.worker_id, reason)
    return Fit(placement, None, worker, None, worker.blocks_of(expected), in_s, in_s, overflow=True)
