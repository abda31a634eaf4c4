"""The choices of one `n > 1` request, which count as one: by the worst of them."""

from collections.abc import Collection
from dataclasses import dataclass, field

from proxy.slo.account import Outcome

UNANSWERED: tuple[Outcome, ...] = ("failed", "rejected", "aborted")
"""With the first of these the whole request has ended."""


@dataclass(slots=True)
class Party:
    """Of one client's request."""

    size: int
    """Its choices."""
    _outcomes: list[Outcome] = field(default_factory=list)
    _told: bool = False

    def ended(self, outcome: Outcome) -> Outcome | None:
        """One choice has ended. Returns the outcome of the request, once, when that is known."""
        self._outcomes.append(outcome)
        if self._told or not (len(self._outcomes) >= self.size or outcome in UNANSWERED):
            return None
        self._told = True
        return worst(self._outcomes)


def worst(outcomes: Collection[Outcome]) -> Outcome:
    """What a client with these choices got."""
    for outcome in UNANSWERED:
        if outcome in outcomes:
            return outcome
    late = "missed_ttft" in outcomes or "missed_both" in outcomes
    uneven = "missed_itl" in outcomes or "missed_both" in outcomes
    return "missed_both" if late and uneven else "missed_ttft" if late else "missed_itl" if uneven else "attained"
