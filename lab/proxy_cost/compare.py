"""From samples to a comparison. Pure.

Ratios are taken within a round, where both arms had the same machine, and their median over rounds is reported.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.proxy_cost.work import Cell, Sample


@dataclass(frozen=True)
class Row:
    """One arm at one cell; medians over rounds."""

    arm: str
    cell: str
    rounds: int
    tokens_per_s: float
    speed: float
    """Tokens per second, as a ratio to the arm that others are compared with."""
    cpu_ms_per_request: float
    behind_cpu_ms_per_request: float
    """Of the API server behind it; not in the figure above."""
    cpu_us_per_token: float
    """Both together."""
    cpu: float
    """Both together, as a ratio."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    """Over all requests of all rounds."""
    tokens_per_event: float
    """1: every token was streamed by itself."""


def compare(
    samples: Mapping[tuple[str, str], Sequence[Sample]], cells: Sequence[Cell], arms: Sequence[str], base: str
) -> list[Row]:
    """Rows by cell, then by arm; ratios to `base`."""
    return [_row(arm, cell, samples[arm, cell.name], samples[base, cell.name]) for cell in cells for arm in arms]


def _row(arm: str, cell: Cell, own: Sequence[Sample], base: Sequence[Sample]) -> Row:
    ttfts = sorted(answer.ttft_s for sample in own for answer in sample.answers)
    events = sum(answer.events for sample in own for answer in sample.answers)
    rounds = list(zip(own, base, strict=True))
    return Row(
        arm=arm,
        cell=cell.name,
        rounds=len(own),
        tokens_per_s=statistics.median(sample.tokens_per_s for sample in own),
        speed=statistics.median(mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in rounds),
        cpu_ms_per_request=statistics.median(sample.cpu_ms_per_request for sample in own),
        behind_cpu_ms_per_request=statistics.median(s.behind_cpu_s / len(s.answers) * 1e3 for s in own),
        cpu_us_per_token=statistics.median(_cpu_us_per_token(sample) for sample in own),
        cpu=statistics.median(_cpu_us_per_token(mine) / _cpu_us_per_token(theirs) for mine, theirs in rounds),
        ttft_p50_ms=quantile(ttfts, 0.5) * 1e3,
        ttft_p99_ms=quantile(ttfts, 0.99) * 1e3,
        tokens_per_event=sum(sample.tokens for sample in own) / max(1, events),
    )


def _cpu_us_per_token(sample: Sample) -> float:
    return (sample.cpu_s + sample.behind_cpu_s) / sample.tokens * 1e6


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed; of sorted values, one at least."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
