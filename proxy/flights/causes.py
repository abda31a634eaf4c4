"""Why a flight failed, in sentences for the client."""

from proxy.flights.events import Cause


def gave_up(worker: str) -> Cause:
    """The worker's engine ended the request by itself."""
    return Cause("ended_by_worker", f"Worker {worker} stopped working on the request")


def no_token(worker: str) -> Cause:
    """A prefill leg ended with nothing."""
    return Cause("no_token", f"Worker {worker} ended the prefill without a token")


def too_often(cause: Cause, losses: int) -> Cause:
    """One loss too many; `losses` in a row, the last because of `cause`."""
    times = "once" if losses == 1 else f"{losses} times in a row"
    return Cause(
        cause.kind,
        f"{cause.message}; the request has lost its workers {times} without a new token (scheduling.max_losses) and is "
        "not tried again",
    )


def after_loss(lost: Cause | None, cause: Cause) -> Cause:
    """`cause` kept a request from being placed; if it was on workers before, that is where it began."""
    if lost is None:
        return cause
    return Cause(lost.kind, f"{lost.message}, and no other worker took over: {cause.message}", cause.retry_after_s)


def cannot_continue(lost: Cause, why_not: str) -> Cause:
    """A worker was lost in the middle of an answer that no other can continue."""
    return Cause(
        "not_continuable",
        f"{lost.message}, and the answer that it had begun cannot go on at another worker: {why_not}; "
        "send the request again",
    )
