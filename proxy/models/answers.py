"""What becomes of a request for a model."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Admitted:
    """The model is up and keeps its place until the ticket is given back."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Waits:
    """A verdict on the ticket follows, at the latest at `until_s`."""

    ticket: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer is an error."""

    status: int
    reason: str
    """One word, for metrics."""
    text: str
    retry_after_s: float | None = None

    @classmethod
    def unknown(cls, name: str) -> Self:
        """There is no such model."""
        return cls(404, "unknown_model", f"The model {name[:200]!r} does not exist here; GET /v1/models lists those")

    @classmethod
    def removed(cls, name: str) -> Self:
        """The model is on its way out."""
        return cls(404, "removed", f"The model {name} is being removed and takes no more requests")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one that waited."""

    ticket: int
    answer: Admitted | Refused


Answer = Admitted | Waits | Refused
