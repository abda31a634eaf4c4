"""Lets the processes of an engine on CPUs sleep while they wait for each other.

vLLM 0.32's engine core and ranks talk through shared memory, and a reader calls `sched_yield` in a loop for the first
second of every wait. On a GPU machine that costs an idle core and saves some microseconds. Here it takes time from
the ranks that compute on the same cores, and Linux 6.18 lets such a loop starve them for many seconds when it changes
cores, because every yield puts its virtual time far ahead.

Relies on `SpinCondition.wait` and the attributes `last_read`, `busy_loop_s`, `poller` and `local_notify_socket` in
`vllm.distributed.device_communicators.shm_broadcast`.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

VARIABLE = "TWINPOOL_ENGINE_WAITS"
"""Environment of a worker: `asleep` puts this module to work, anything else leaves vLLM as it is."""

MISSED_NOTICE_MS = 1
"""A writer's notice may be lost when it closely follows another; vLLM's loop does not depend on it either."""


def register() -> None:
    """Entry point `vllm.general_plugins`; vLLM may call it more than once per process."""
    if os.environ.get(VARIABLE) != "asleep":
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition.wait, "__wrapped__"):
        SpinCondition.wait = asleep(SpinCondition.wait)


def asleep(wait: Callable[..., None]) -> Callable[..., None]:
    """`SpinCondition.wait` that sleeps where vLLM's yields; its caller looks for data after each return."""

    @wraps(wait)
    def wait_asleep(condition: "SpinCondition", timeout_ms: int | None = None) -> None:
        if time.monotonic() > condition.last_read + condition.busy_loop_s:
            wait(condition, timeout_ms)
        elif condition.local_notify_socket in dict(condition.poller.poll(MISSED_NOTICE_MS)):
            condition.local_notify_socket.recv(flags=zmq.NOBLOCK, copy=False)

    return wait_asleep
