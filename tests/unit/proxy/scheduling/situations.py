"""Workers and requests for tests of scheduling: `p…` are prefill workers, `d…` decode workers."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from proxy.scheduling.place import Decision, Placement, Policy
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.slo import OverloadPolicy, SloClass, Standing
from proxy.scheduling.view import RequestShape, WorkerFacts

POLICY = Policy(remote_prefill_min_tokens=64, on_no_prefill="local", prior_prefill_tokens_per_s=1000.0)


def facts(worker_id: str, **changes: Any) -> WorkerFacts:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": "prefill" if worker_id.startswith("p") else "decode",
        "epoch": "1",
        "index": int(worker_id[1:]) * 2 + worker_id.startswith("d"),
        "fingerprint": "f",
        "max_model_len": 8192,
        "block_size": 16,
        "num_blocks": 10_000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }
    return WorkerFacts(**(values | changes))


def shape(num_prompt_tokens: int = 500, max_tokens: int = 16, **changes: Any) -> RequestShape:
    standing = Standing(
        slo=SloClass(
            changes.pop("name", "default"),
            changes.pop("ttft_s", 3.0),
            changes.pop("itl_s", 0.1),
            changes.pop("on_overload", "queue"),
            changes.pop("longest_step_s", inf),
        ),
        priority=changes.pop("priority", 0),
        tenant=changes.pop("tenant", ""),
    )
    values = {"first_token_mode": True} | changes
    return RequestShape(num_prompt_tokens, max_tokens, standing=standing, **values)


def scheduler(*workers: str | WorkerFacts, policy: Policy = POLICY, prefixes: Any = None) -> Scheduler:
    fresh = Scheduler(policy, prefixes)
    fresh.observe_pools([facts(w) if isinstance(w, str) else w for w in workers], frozenset(), 0.0)
    return fresh


def placed(decisions: Iterable[Decision]) -> dict[str, Placement]:
    return {decision.request_id: decision.placement for decision in decisions}


def first_place(scheduler: Scheduler, request: RequestShape, request_id: str = "r", now_s: float = 0.0) -> Placement:
    """What is decided about a request the moment it comes."""
    scheduler.add(request_id, request, now_s, now_s)
    return placed(scheduler.place(now_s))[request_id]


class Caches:
    """Prefixes by hand: `{worker: {hashes: tokens}}`."""

    def __init__(self, known: Mapping[str, Mapping[Any, int]]) -> None:
        self.known = known

    def cached_tokens(self, hashes: Any) -> dict[str, int]:
        return {worker: tokens[hashes] for worker, tokens in self.known.items() if hashes in tokens}


__all__ = ["POLICY", "Caches", "OverloadPolicy", "facts", "first_place", "placed", "scheduler", "shape"]
