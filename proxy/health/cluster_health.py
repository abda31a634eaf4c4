"""The state of the cluster as `/health` and `/ready` see it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cluster.config import LivenessConfig
from proxy.dispatch.dispatcher import Dispatcher
from proxy.health.readiness import Readiness
from proxy.health.verdict import cluster_faults
from proxy.scheduling.view import Role
from proxy.workers.worker_pool import WorkerPool

AWAKE = "awake"


class ClusterHealth:
    """Reads what the dispatcher and the roster know.

    `supervised` are the tasks that must not end while the proxy serves; `sleep` is `proxy.workers.sleeping`'s state.
    """

    def __init__(
        self,
        pool: WorkerPool,
        dispatcher: Dispatcher,
        liveness: LivenessConfig,
        supervised: Sequence["asyncio.Task[Any]"],
        sleep: Callable[[], str] = lambda: AWAKE,
    ) -> None:
        self._roster = pool.roster
        self._dispatcher = dispatcher
        self._liveness = liveness
        self._supervised = supervised
        self._sleep = sleep

    def sleep(self) -> str:
        """`asleep`, or on the way there or back; empty: neither."""
        state = self._sleep()
        return "" if state == AWAKE else state

    def faults(self) -> list[str]:
        """Why the server should be restarted; empty if it should not."""
        after_s = self._liveness.stalled_after_s
        ended = [f"the proxy's task {task.get_name()} has ended" for task in self._supervised if task.done()]
        stalls = self._dispatcher.progress.stalled(after_s)
        # Starting the whole server again would take longer than the worker that is being started.
        num_decode = len(self._roster.alive("decode")) + len(self._roster.coming_back("decode"))
        return [*ended, *cluster_faults(num_decode, stalls, after_s)]

    def readiness(self, probe: Callable[[], Awaitable[None]]) -> Readiness:
        """Of new requests; `probe` sends one through the cluster."""
        return Readiness(self._liveness.ready_within_s, self._last_at_s, probe, self._obstacle)

    def _last_at_s(self) -> float | None:
        witness = self._dispatcher.witness
        return witness.handed_over_at_s if self._roster.expects_prefill else witness.answered_at_s

    def _obstacle(self) -> str:
        roles: tuple[Role, ...] = ("prefill", "decode") if self._roster.expects_prefill else ("decode",)
        if sleep := self.sleep():
            return f"the cluster is {sleep}; POST /twinpool/wake wakes it, with several models a request does"
        missing = [role for role in roles if not self._roster.taking_requests(role)]
        return f"no {' and no '.join(missing)} worker takes requests" if missing else ""
