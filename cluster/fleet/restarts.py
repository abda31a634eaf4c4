"""Whether a worker's process that ended is started again, and when. Pure: time is passed in."""

import signal
from dataclasses import dataclass, field
from typing import Literal

from cluster.launch.backoff import Backoff

Mode = Literal["on_failure", "never", "always"]

BACKOFF_S = (1.0, 3.0, 10.0, 30.0)
"""Before the next start, after so many failures in a row; the last one also after more. It stays down only if it fails
once more without having come as far as the cluster: then it cannot start at all."""
STEADY_S = 10.0
"""A worker that was in the cluster for so long did not fail in a row with the time before."""


@dataclass(frozen=True, slots=True)
class StartAgain:
    after_s: float
    text: str
    """What happens next, for the operator; goes on a sentence about the worker."""


@dataclass(frozen=True, slots=True)
class StayDown:
    text: str


Outlook = StartAgain | StayDown
REMOVED = StayDown("it was removed")


@dataclass(slots=True)
class _Record:
    joined_s: float | None = None
    """Since when the present process is in the cluster."""
    backoff: Backoff = field(default_factory=lambda: Backoff(BACKOFF_S, STEADY_S))
    order: Literal["", "start", "stay", "gone"] = ""
    """What an operator wants to follow the end of the present process."""


@dataclass(slots=True)
class Restarts:
    """The policy and what it has seen of every worker."""

    mode: Mode
    _records: dict[str, _Record] = field(default_factory=dict)

    def joined(self, worker_id: str, now_s: float) -> None:
        """The worker is in the cluster: its engine is up."""
        record = self._of(worker_id)
        if record.joined_s is None:
            record.joined_s = now_s

    def order(self, worker_id: str, what: Literal["start", "stay", "gone"]) -> None:
        """What is to follow the end of the present process, whatever the mode. `gone` is the last word."""
        if self._of(worker_id).order != "gone":
            self._of(worker_id).order = what

    def forgive(self, worker_id: str) -> None:
        """An operator tries it anew."""
        self._records[worker_id] = _Record()

    def forget(self, worker_id: str) -> None:
        """It never comes back."""
        self._records.pop(worker_id, None)

    def ended(self, worker_id: str, returncode: int, now_s: float) -> Outlook:
        """What follows the end of a process."""
        record = self._of(worker_id)
        joined_s, record.joined_s = record.joined_s, None
        order, record.order = record.order, ""
        if order == "start":
            record.backoff.forget()
            return StartAgain(0.0, "it is started again, as it was told")
        told = returncode in (0, -signal.SIGTERM)
        if order == "gone":
            return REMOVED
        if order == "stay":
            return StayDown(f"`twinpool restart {worker_id}` starts it again")
        if self.mode == "never":
            return StayDown(f"it is not started again (restart: never); `twinpool restart {worker_id}` does that")
        if told and self.mode == "on_failure":
            return StayDown(f"`twinpool restart {worker_id}` starts it again")
        after_s = record.backoff.failed(now_s - joined_s if joined_s is not None else 0.0)
        failures = record.backoff.failures
        if joined_s is None and failures > len(BACKOFF_S):
            record.backoff.forget()
            return StayDown(
                f"it failed {failures} times in a row, now before it was up, and is not started again; repair the "
                f"cause and call `twinpool restart {worker_id}`"
            )
        return StartAgain(after_s, f"it is started again in {after_s:g} s")

    def _of(self, worker_id: str) -> _Record:
        return self._records.setdefault(worker_id, _Record())
