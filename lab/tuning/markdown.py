"""Tables as text."""

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def table(heads: Sequence[str], rows: Rows) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def ms(seconds: float | None) -> str:
    """Three digits at most."""
    return "-" if seconds is None else _digits(seconds * 1000)


def gb(num_bytes: float) -> str:
    """In units of 1e9."""
    return _digits(num_bytes / 1e9)


def count(number: float) -> str:
    return f"{number:,.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
