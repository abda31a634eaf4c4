"""`python -m lab.load_check`: 500 streams of 20 tokens/s each; does the generator add over 5 ms to a percentile?"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from lab.load_check.check import ALLOWED_S, check


def main() -> None:
    """Exit status 1 when it adds more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500, help="at the same time")
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of each")
    parser.add_argument("--seconds", type=float, default=20.0, help="that all of them last; it takes twice as long")
    options = parser.parse_args()
    found = check(options.streams, options.tokens_per_s, options.seconds)
    table = Table("percentile", "TTFT sent, ms", "measured, ms", "gaps sent, ms", "measured, ms", box=None)
    for row in found.rows:
        times = (row.ttft_sent_s, row.ttft_s, row.gap_sent_s, row.gap_s)
        table.add_row(f"p{row.percentile:g}", *(f"{seconds * 1000:.1f}" for seconds in times))
    out = Console(highlight=False)
    out.print(table)
    out.print(
        f"{found.num_streams} streams, at most {found.most_at_once} at once, {found.num_failed} failed. Up to p98 the "
        f"generator adds at most {found.added_s * 1000:.1f} ms (allowed: {ALLOWED_S * 1000:.0f}); it used "
        f"{found.cpu_share:.0%} of a core.",
        soft_wrap=True,
    )
    sys.exit(0 if found.added_s <= ALLOWED_S and not found.num_failed else 1)


if __name__ == "__main__":
    main()
