"""Reads from the scheduler what the controller wants to know; the live proxy and the simulator have the same one."""

from collections.abc import Mapping

from proxy.scaling.look import Arrivals, Batch, Look, Measured, PoolSize
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import Role

SAMPLES_TO_BELIEVE = 12
"""Prefills that were watched before what is known of their speed says how many workers are needed."""


def prompt_alone_s(scheduler: Scheduler, num_tokens: int) -> float:
    """How long a prompt takes a worker that has nothing else to do; 0 as long as that is not known."""
    return scheduler.books.pools.average.prefill_s(num_tokens) if _is_known(scheduler) else 0.0


def look_at(scheduler: Scheduler, measured: Measured, pools: Mapping[Role, PoolSize], seconds: float) -> Look:
    """Everything since the last look, which was `seconds` ago."""
    demand = scheduler.demand.take()
    average = scheduler.books.pools.average
    is_known = _is_known(scheduler)
    return Look(
        seconds=seconds,
        pools=pools,
        arrivals=tuple(
            Arrivals(
                asked.slo.ttft_s,
                asked.slo.itl_s,
                asked.slo.on_overload != "queue",
                asked.count,
                tuple(average.prefill_s(tokens) for tokens in asked.prompt_tokens) if is_known else (),
            )
            for asked in demand.by_class.values()
        ),
        prefill_share=demand.prefill_share,
        queued_prefill_s=scheduler.queued_prefill_s * demand.prefill_share if is_known else 0.0,
        waiting_for_decode=scheduler.num_waiting_for_decode,
        batches=tuple(
            Batch(
                requests=worker.num_requests,
                running=worker.num_running,
                step_s=worker.costs.step_s if worker.was_watched else 0.0,
                blocks_taken=worker.reserved + worker.foreign,
                blocks_total=worker.blocks_total,
                max_requests=worker.facts.max_num_seqs,
            )
            for worker in scheduler.books.pools.decode.values()
        ),
        measured=measured,
    )


def _is_known(scheduler: Scheduler) -> bool:
    """Before that, speed is what was configured: wrong by factors, and so would be the number of workers."""
    return scheduler.books.pools.average.num_samples >= SAMPLES_TO_BELIEVE
