"""What happens to a request whose first token cannot come in time."""

from typing import Literal

from proxy.scheduling.place import Reject
from proxy.scheduling.waiting.fair_queue import Entry

QUEUE_CAUTION = 1.15
"""A request joins the queue only if it is in time even when everything takes this much longer than predicted."""
SOONEST_RETRY_S = 1.0
LATEST_RETRY_S = 60.0


def judge(
    entry: Entry, first_token_in_s: float, alone_s: float, caution: float, now_s: float
) -> Reject | Literal["demote"] | None:
    """By the policy of its class; None: it is in time, or stays where it is all the same.

    `alone_s`: what it would take with no other request anywhere. `caution`: by how much predictions are stretched; not
    for a request that nobody is before, because it would not get anything better later.
    """
    stretched_s = first_token_in_s * caution if first_token_in_s > alone_s else first_token_in_s
    late_s = now_s + stretched_s - entry.deadline_s
    slo = entry.shape.standing.slo
    if late_s <= 0.0 or entry.shape.promised or entry.demoted or slo.on_overload == "queue":
        return None
    if slo.on_overload == "demote":
        return "demote"
    promise = f"class `{slo.name}` asks for {slo.ttft_s:g} s"
    if alone_s > slo.ttft_s:
        message = f"The prompt takes {alone_s:.1f} s to compute even on an idle worker, and its {promise}."
        return Reject(503, "too_late", f"{message} Send a shorter prompt, or choose another class.")
    total_s = now_s - entry.arrived_s + first_token_in_s
    message = f"The first token would come after {total_s:.1f} s, and its {promise}; try again later."
    return Reject(503, "too_late", message, retry_after_s(late_s))


def retry_after_s(seconds: float) -> float:
    """Within sensible bounds."""
    return min(LATEST_RETRY_S, max(SOONEST_RETRY_S, seconds))
