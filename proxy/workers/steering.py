"""The controller's shell: looks at the cluster every few seconds and gives the orders that an operator would give."""

import asyncio
import logging
import time
from typing import Protocol

from cluster.config import ROLES, ClusterConfig
from cluster.orders import RoleOrder, ScaleOrder
from cluster.status import AutoscaleStatus
from proxy.metrics import ProxyMetrics
from proxy.scaling.autoscaler import OTHER, Autoscaler
from proxy.scaling.look import Decision, PoolSize
from proxy.scaling.meter import Meter
from proxy.scaling.observe import look_at
from proxy.scaling.rules import Bounds, ScalingRules
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import Role
from proxy.workers.administration import Administration, OrderRefused
from proxy.workers.resizing import Resizing

log = logging.getLogger("twinpool.scaling")

MOST_WORKERS = 1024
REFUSED_FOR_S = 60.0
"""So long an order that was refused is not repeated."""
LONGEST_LOOK = 3.0
"""Times `every_s`. More was a pause of this process or machine, in which nobody counted; it is no time without load."""


def scaling_rules(config: ClusterConfig, devices: int | None) -> ScalingRules:
    """From the configuration. `devices`: GPUs or shares of cores for all workers; None: nobody counts them."""
    given = config.autoscale
    bounds: dict[Role, Bounds] = {}
    for role in ROLES:
        wanted = given.prefill if role == "prefill" else given.decode
        bounds[role] = Bounds(wanted.min, wanted.max or MOST_WORKERS)
    ranks: dict[Role, int] = {role: config.pools.of(role).tensor_parallel for role in ROLES}
    return ScalingRules(
        bounds=bounds,
        goal=given.goal,
        every_s=given.every_s,
        window_s=given.window_s,
        hold_s=given.hold_s,
        margin=given.margin,
        devices=devices,
        ranks=ranks,
        convertible=ranks["prefill"] == ranks["decode"],
    )


class Observed(Protocol):
    """What is looked at (`proxy.dispatch.dispatcher.Dispatcher`)."""

    @property
    def meter(self) -> Meter: ...
    @property
    def scheduler(self) -> Scheduler: ...


class Steering:
    """Used on the proxy's event loop. `run` must not end while the proxy serves."""

    def __init__(
        self,
        observed: Observed,
        administration: Administration,
        resizing: Resizing,
        rules: ScalingRules,
        metrics: ProxyMetrics,
    ) -> None:
        self._observed = observed
        self._administration = administration
        self._resizing = resizing
        self._rules = rules
        self._metrics = metrics
        self._autoscaler = Autoscaler(rules)
        self._refused_until_s = dict.fromkeys(ROLES, 0.0)
        self._refusals: dict[Role, str] = {}
        self._status = AutoscaleStatus()

    @property
    def status(self) -> AutoscaleStatus:
        """What came of the last look."""
        return self._status

    async def run(self, serving: asyncio.Event) -> None:
        """Until it is cancelled; orders are given once `serving` is set."""
        await serving.wait()
        seen_s = time.monotonic()
        self._observed.meter.take()
        self._observed.scheduler.demand.take()
        while True:
            await asyncio.sleep(self._rules.every_s)
            now_s = time.monotonic()
            self.look(now_s - seen_s, now_s)
            seen_s = now_s

    def look(self, seconds: float, now_s: float) -> None:
        """One look, `seconds` after the last, and what follows from it."""
        seconds = min(seconds, LONGEST_LOOK * self._rules.every_s)
        sizes = self._sizes()
        measured = self._observed.meter.take()
        decision = self._autoscaler.decide(look_at(self._observed.scheduler, measured, sizes, seconds))
        for role in ROLES:
            self._metrics.workers_wanted.labels(role).set(decision.want[role])
        warnings = [*decision.warnings, *self._refusals.values()]
        if set(warnings) - set(self._status.warnings):
            log.warning("autoscale_warning %s", "; ".join(warnings))
        self._act(decision, now_s)
        last = "; ".join(decision.reasons) or self._status.last_reason
        self._status = AutoscaleStatus({str(role): count for role, count in decision.want.items()}, last, warnings)

    def _sizes(self) -> dict[Role, PoolSize]:
        found = {role: self._resizing.members(role) for role in ROLES}
        return {
            role: PoolSize(len(pool.serving), len(pool.changing) + len(pool.coming)) for role, pool in found.items()
        }

    def _act(self, decision: Decision, now_s: float) -> None:
        if self._administration.restarts or not self._administration.is_awake():
            return  # who is about to be started again is missing for that long only; who sleeps has nothing to do
        if decision.reasons:
            log.info("autoscale want=%s convert=%d reasons=%s", dict(decision.want), decision.convert, decision.reasons)
        if decision.convert:
            self._convert("prefill" if decision.convert > 0 else "decode", abs(decision.convert))
        for role in ROLES:
            wanted, now = decision.want[role], self._resizing.members(role).count
            if wanted == now:
                self._refusals.pop(role, None)
            if wanted == now or (wanted > now and now_s < self._refused_until_s[role]):
                continue
            self._refusals.pop(role, None)
            try:
                self._administration.scale(ScaleOrder(role, wanted))
            except OrderRefused as refused:
                self._refused_until_s[role] = now_s + REFUSED_FOR_S
                self._refusals[role] = str(refused)

    def _convert(self, source: Role, count: int) -> None:
        """Those that serve and have least to do change to the other pool."""
        for worker_id in self._resizing.least_busy(source, count):
            try:
                self._administration.set_role(worker_id, RoleOrder(OTHER[source]))
            except OrderRefused as refused:
                log.warning("autoscale_role_refused worker=%s reason=%s", worker_id, refused)
