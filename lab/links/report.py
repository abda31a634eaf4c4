"""What was measured, as it is written to a file, and what follows from it. No I/O."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from lab.links.arms.kinds import ARMS
from lab.links.shapes import BlockShape

HOST_TARGET = 0.9
ZMQ_TARGET = 1.5
BEHIND_TARGET_S = 0.05


class Spread(msgspec.Struct, frozen=True):
    """Of several repeats."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(min(values), statistics.median(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of them that `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Series(msgspec.Struct, frozen=True):
    """One arm's repeats of one piece of work; entry `i` of every series of a shape comes from the same round."""

    arm: str
    model: str
    concurrent: int
    """Transfers at once, which share the bytes."""
    num_blocks: int
    num_bytes: int
    seconds: list[float]

    @property
    def gb_per_s(self) -> Spread:
        """1e9 bytes/s."""
        return Spread.of([self.num_bytes / seconds / 1e9 for seconds in self.seconds])


class Skipped(msgspec.Struct, frozen=True):
    arm: str
    reason: str
    is_failure: bool
    """It began and failed, instead of being impossible on this machine."""


class Fairness(msgspec.Struct, frozen=True):
    """One block over a link that is busy with a large transfer, beside the same on an idle one."""

    link: str
    model: str
    large_bytes: int
    small_bytes: int
    large_s: list[float]
    alone_s: list[float]
    behind_s: list[float]

    @property
    def added_s(self) -> float:
        """Median behind the large one, less the median alone."""
        return statistics.median(self.behind_s) - statistics.median(self.alone_s)

    @property
    def mostly_added_s(self) -> float:
        """The same of the 95th percentile: a single stop of a busy machine does not count as the link's."""
        return percentile(self.behind_s, 0.95) - statistics.median(self.alone_s)


class Verdict(msgspec.Struct, frozen=True):
    target: str
    found: str
    is_met: bool | None
    """None when it was not measured."""


class Machine(msgspec.Struct, frozen=True):
    cores: int
    processor: str
    memory_bytes: int
    load_before: float
    """Mean number of runnable processes over the minute before."""


class Report(msgspec.Struct, frozen=True):
    machine: Machine
    versions: dict[str, str]
    """Of the packages that moved bytes."""
    shapes: list[BlockShape]
    series: list[Series]
    skipped: list[Skipped]
    fairness: list[Fairness]
    seconds: float
    """What all of it took."""

    def find(self, arm: str, model: str, concurrent: int) -> Series | None:
        """Arms without concurrency stand for every number of transfers."""
        wanted = concurrent if ARMS[arm].is_concurrent else 1
        for series in self.series:
            if (series.arm, series.model, series.concurrent) == (arm, model, wanted):
                return series
        return None

    def ratio(self, series: Series, other_arm: str) -> float | None:
        """How many times as fast as another arm at the same work: the median over rounds, since a machine's speed
        drifts from round to round."""
        other = self.find(other_arm, series.model, series.concurrent) if other_arm else None
        if other is None:
            return None
        rates = zip(series.seconds, other.seconds, strict=False)
        return statistics.median((series.num_bytes / ours) / (other.num_bytes / theirs) for ours, theirs in rates)

    def verdicts(self) -> list[Verdict]:
        return [
            self._ratio_verdict("host", "readv", HOST_TARGET),
            self._ratio_verdict("zmq", "mooncake", ZMQ_TARGET),
            *(_fairness_verdict(fairness) for fairness in self.fairness),
        ]

    def _ratio_verdict(self, arm: str, other: str, at_least: float) -> Verdict:
        target = f"{arm} at least {at_least:g} times {ARMS[other].title}"
        ratios = [ratio for series in self.series if series.arm == arm and (ratio := self.ratio(series, other))]
        if not ratios:
            return Verdict(target, "not measured", None)
        return Verdict(target, f"{min(ratios):.2f} to {max(ratios):.2f} times", min(ratios) >= at_least)


def _fairness_verdict(fairness: Fairness) -> Verdict:
    large = f"{fairness.large_bytes / (1 << 30):.3g} GiB"
    target = f"one block behind {large} over {fairness.link} within {BEHIND_TARGET_S * 1e3:.0f} ms of alone"
    found = f"{fairness.added_s * 1e3:.1f} ms longer, 95 % of them at most {fairness.mostly_added_s * 1e3:.1f} ms"
    return Verdict(target, found, fairness.mostly_added_s <= BEHIND_TARGET_S)
