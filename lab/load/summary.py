"""From records to percentiles and goodput. Pure."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from lab.load.client import Record
from lab.load.work import WorkClass

PERCENTILES = (50, 90, 99)


class Spread(msgspec.Struct):
    """Percentiles in seconds; None without samples."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class ClassSummary(msgspec.Struct):
    """What one class got. Shares are of all requests offered, failed ones included."""

    name: str
    offered: int
    whole: int
    """Came whole and without an error."""
    rejected: int
    """Answered 429 or 503."""
    good: int | None
    """Whole, and within both limits; None where the class has no limits."""
    met_ttft: int | None
    met_itl: int | None
    ttft_s: Spread
    itl_s: Spread
    """Every gap of every whole request."""
    second_gap_s: Spread
    """From the first to the second token, where a hand-over hides."""
    time_per_token_s: Spread
    """Per request: from its first to its last token, by the number of tokens between; an event may hold several."""
    end_to_end_s: Spread
    reject_s: Spread
    """How long a refusal took."""
    tokens_per_s: float
    """Output of whole requests, over the whole run."""

    @property
    def attained(self) -> float | None:
        """Share of good requests."""
        return self.good / self.offered if self.good is not None and self.offered else None


class Summary(msgspec.Struct):
    """A whole run."""

    seconds: float
    """From the first to the last byte."""
    classes: list[ClassSummary]
    total: ClassSummary
    late_s: Spread
    """How late this generator sent its requests."""
    errors: dict[str, int]


def summarize(classes: Sequence[WorkClass], records: Sequence[Record], seconds: float) -> Summary:
    """`seconds`: what the run took."""
    limits = {work.name: work for work in classes}
    by_class = [
        _class_summary(work.name, [r for r in records if r.work == work.name], limits, seconds) for work in classes
    ]
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            kind = record.error if record.status in (0, 200) else str(record.status)
            errors[kind[:80]] = errors.get(kind[:80], 0) + 1
    late = spread(r.late_s for r in records)
    return Summary(seconds, by_class, _class_summary("all", records, limits, seconds), late, errors)


def is_good(record: Record, work: WorkClass) -> bool:
    """Whole, and both limits are met."""
    return not record.error and _met_ttft(record, work) and _met_itl(record, work)


def _met_ttft(record: Record, work: WorkClass) -> bool:
    return work.ttft_s is None or (record.ttft_s is not None and record.ttft_s <= work.ttft_s)


def _met_itl(record: Record, work: WorkClass) -> bool:
    return work.itl_s is None or not record.gaps_s or float(np.percentile(record.gaps_s, 99)) <= work.itl_s


def _class_summary(name: str, records: Sequence[Record], limits: dict[str, WorkClass], seconds: float) -> ClassSummary:
    whole = [r for r in records if not r.error]
    refused = [r for r in records if r.status in (429, 503)]
    has_limits = any(limits[r.work].ttft_s is not None or limits[r.work].itl_s is not None for r in records)
    return ClassSummary(
        name=name,
        offered=len(records),
        whole=len(whole),
        rejected=len(refused),
        good=sum(is_good(r, limits[r.work]) for r in records) if has_limits else None,
        met_ttft=sum(_met_ttft(r, limits[r.work]) for r in whole) if has_limits else None,
        met_itl=sum(_met_itl(r, limits[r.work]) for r in whole) if has_limits else None,
        ttft_s=spread(r.ttft_s for r in whole if r.ttft_s is not None),
        itl_s=spread(gap for r in whole for gap in r.gaps_s),
        second_gap_s=spread(r.gaps_s[0] for r in whole if r.gaps_s),
        time_per_token_s=spread(sum(r.gaps_s) / max(r.tokens - 1, len(r.gaps_s)) for r in whole if r.gaps_s),
        end_to_end_s=spread(r.end_to_end_s for r in whole),
        reject_s=spread(r.end_to_end_s for r in refused),
        tokens_per_s=sum(r.tokens for r in whole) / seconds if seconds > 0 else 0.0,
    )


def spread(values: Iterable[float]) -> Spread:
    """Percentiles by linear interpolation."""
    samples = np.fromiter(values, dtype=float)
    if not samples.size:
        return Spread(None, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(samples, PERCENTILES))
    return Spread(p50, p90, p99, float(samples.max()))
