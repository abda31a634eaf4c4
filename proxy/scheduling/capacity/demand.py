"""What requests ask for, whether or not anybody gives it; for whoever decides how many workers there shall be."""

from dataclasses import dataclass, field

from proxy.scheduling.slo import PROBE, SloClass

SAMPLED = 64
"""Prompts of a class whose lengths are kept one by one between two looks."""
FADES = 0.8
"""What is remembered, at each look, of the looks before it."""


@dataclass(slots=True)
class Asked:
    """By one class."""

    slo: SloClass
    count: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    """Of the first `SAMPLED` prompts."""


@dataclass(slots=True)
class Demand:
    """Since it was last taken."""

    by_class: dict[str, Asked] = field(default_factory=dict)
    _placed_s: float = 0.0
    _computed_s: float = 0.0

    def arrived(self, slo: SloClass, prompt_tokens: int) -> None:
        """A request was added."""
        if slo.name == PROBE.name:
            return
        asked = self.by_class.get(slo.name)
        if asked is None:
            asked = self.by_class[slo.name] = Asked(slo)
        asked.count += 1
        if len(asked.prompt_tokens) < SAMPLED:
            asked.prompt_tokens.append(prompt_tokens)

    def placed(self, prefill_s: float, computed_s: float) -> None:
        """A request was placed; prefill workers compute (or would, if one were free) `computed_s` of its prompt."""
        self._placed_s += prefill_s
        self._computed_s += computed_s

    @property
    def prefill_share(self) -> float:
        """Of all prompts' computation, the part that is left for prefill workers."""
        return self._computed_s / self._placed_s if self._placed_s else 1.0

    def take(self) -> "Demand":
        """What came since the last time."""
        taken = Demand(self.by_class, self._placed_s, self._computed_s)
        self.by_class = {}
        self._placed_s *= FADES
        self._computed_s *= FADES
        return taken
