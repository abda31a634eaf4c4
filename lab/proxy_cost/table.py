"""The comparison, for people."""

import itertools
from collections.abc import Sequence

from rich.table import Table

from lab.proxy_cost.compare import Row


def table(rows: Sequence[Row], base: str) -> Table:
    """A section per cell."""
    shown = Table(title=f"API servers in front of engines that cost nothing; ratios to {base}", title_justify="left")
    shown.add_column("streams x tokens")
    shown.add_column("")
    for column in ("tokens/s", "ratio", "CPU ms/request", "CPU us/token", "ratio", "TTFT p50 / p99", "tokens/event"):
        shown.add_column(column, justify="right")
    for cell, of_cell in itertools.groupby(rows, key=lambda row: row.cell):
        for number, row in enumerate(of_cell):
            behind = f" + {row.behind_cpu_ms_per_request:.1f}" if row.behind_cpu_ms_per_request else ""
            shown.add_row(
                cell if number == 0 else "",
                row.arm,
                f"{row.tokens_per_s:,.0f}",
                f"{row.speed:.2f}",
                f"{row.cpu_ms_per_request:.2f}{behind}",
                f"{row.cpu_us_per_token:.0f}",
                f"{row.cpu:.2f}",
                f"{row.ttft_p50_ms:,.0f} / {row.ttft_p99_ms:,.0f} ms",
                f"{row.tokens_per_event:.2f}",
            )
        shown.add_section()
    return shown
