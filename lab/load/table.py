"""A summary as tables."""

from rich.console import Group
from rich.table import Table

from lab.load.summary import ClassSummary, Spread, Summary


def tables(summary: Summary) -> Group:
    """Times in milliseconds, as p50 / p99 (max)."""
    counts = Table("class", "offered", "whole", "refused", "TTFT met", "ITL met", "both", "tokens/s", box=None)
    times = Table("class", "TTFT", "ITL, every gap", "token 1 to 2", "per token", "end to end", "refusal", box=None)
    shown = summary.classes if len(summary.classes) == 1 else [*summary.classes, summary.total]
    for row in shown:
        counts.add_row(
            row.name, str(row.offered), str(row.whole), str(row.rejected),
            *(_share(count, row) for count in (row.met_ttft, row.met_itl, row.good)), f"{row.tokens_per_s:.1f}",
        )  # fmt: skip
        spreads = (row.ttft_s, row.itl_s, row.second_gap_s, row.time_per_token_s, row.end_to_end_s, row.reject_s)
        times.add_row(row.name, *(_ms(spread) for spread in spreads))
    notes = [f"The generator sent its requests {_ms(summary.late_s)} ms late; the run took {summary.seconds:.1f} s."]
    notes += [f"{count} x {kind}" for kind, count in sorted(summary.errors.items())]
    return Group(counts, "", "Milliseconds: p50 / p99 (max)", times, "", *notes)


def _share(count: int | None, row: ClassSummary) -> str:
    return "-" if count is None or not row.offered else f"{100 * count / row.offered:.1f} %"


def _ms(spread: Spread) -> str:
    if spread.p50 is None or spread.p99 is None or spread.max is None:
        return "-"
    return f"{spread.p50 * 1000:.0f} / {spread.p99 * 1000:.0f} ({spread.max * 1000:.0f})"
