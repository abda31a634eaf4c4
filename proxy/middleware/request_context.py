"""What is known of an HTTP request besides its body, for the code that sees only its `EngineCoreRequest`.

A context variable carries it from the middlewares to `add_request_async`: tasks that vLLM starts for a request, also
those in the background, get a copy of the variable and with it the same object. On the way back it carries what an
exception of vLLM's cannot say, for the middleware that sends the reply.
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace

from proxy.scheduling.slo import DEFAULT_STANDING, Standing

DEFAULT_PRIORITY_RANGE = 1000


class PriorityOutOfRange(ValueError):
    """A client asks for more, or for less, than anybody may."""


@dataclass(slots=True, weakref_slot=True)
class RequestContext:
    """Of one HTTP request, which may lead to several generations."""

    standing: Standing = DEFAULT_STANDING
    priority_range: int = DEFAULT_PRIORITY_RANGE
    """A generation's own `priority` lies between minus this and this."""
    retry_after_s: float | None = None
    """When it is worth trying again, set when one of its generations was turned away."""


CURRENT: ContextVar[RequestContext | None] = ContextVar("twinpool_request", default=None)


def current_standing(priority: int) -> Standing:
    """The standing of a generation with this `priority` of its own, in the task of its request.

    Raises `PriorityOutOfRange` with a sentence for the client.
    """
    context = CURRENT.get() or RequestContext()
    if not priority:
        return context.standing
    if abs(priority) > context.priority_range:
        bounds = f"this server takes {-context.priority_range} to {context.priority_range} (slo.priority_range)"
        raise PriorityOutOfRange(f"priority is {priority}, but {bounds}")
    return replace(context.standing, priority=context.standing.priority + priority)
