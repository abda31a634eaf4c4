"""What is known of an HTTP request besides its body, for the code that sees only its `EngineCoreRequest`.

A context variable carries it from the middlewares to `add_request_async`: tasks that vLLM starts for a request, also
those in the background, get a copy of the variable and with it the same object. On the way back it carries what an
exception of vLLM's cannot say, for the middleware that sends the reply.
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace

from proxy.scheduling.slo import DEFAULT_STANDING, Standing

PRIORITY_LIMIT = 1 << 20


@dataclass(slots=True, weakref_slot=True)
class RequestContext:
    """Of one HTTP request, which may lead to several generations."""

    standing: Standing = DEFAULT_STANDING
    retry_after_s: float | None = None
    """When it is worth trying again, set when one of its generations was turned away."""


CURRENT: ContextVar[RequestContext | None] = ContextVar("twinpool_request", default=None)


def current_standing(priority: int) -> Standing:
    """The standing of a generation with this `priority` of its own, in the task of its request."""
    context = CURRENT.get()
    standing = context.standing if context is not None else DEFAULT_STANDING
    if not priority:
        return standing
    # Bounded, since the sum travels in messages; a client's number may have 64 bits.
    summed = max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, standing.priority + priority))
    return replace(standing, priority=summed)
