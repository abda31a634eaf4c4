"""The report on a terminal of 80 columns."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lab.links.arms.kinds import ARMS
from lab.links.report import Fairness, Report, Series, Skipped, Spread
from lab.links.shapes import BlockShape


def tables(report: Report) -> RenderableType:
    """Rates per shape, single blocks behind a large transfer, what was left out and why, and the targets."""
    parts: list[RenderableType] = []
    for shape in report.shapes:
        if of_shape := [series for series in report.series if series.model == shape.model]:
            parts += [_rates(report, shape, of_shape), Text()]
    if report.fairness:
        parts += [_fairness(report.fairness), Text()]
    parts += _left_out(report.skipped)
    for verdict in report.verdicts():
        word, style = {True: ("met", "green"), False: ("MISSED", "yellow"), None: ("", "dim")}[verdict.is_met]
        parts.append(Text(f"{verdict.target}: {verdict.found} {word}".rstrip(), style=style))
    machine = report.machine
    about = (
        f"{machine.cores} cores ({machine.processor}), load {machine.load_before:.1f} before; {report.seconds:.0f} s "
        "in all. GB/s are 1e9 bytes/s. Ratios are medians over rounds of the ratios within a round; they say little "
        "where the load is not well below the number of cores."
    )
    return Group(*parts, Text(about, style="dim"))


def _rates(report: Report, shape: BlockShape, of_shape: list[Series]) -> Table:
    first = of_shape[0]
    title = (
        f"{shape.model}: {first.num_blocks} blocks of {shape.block_size} tokens, each {shape.num_layers} x "
        f"{shape.piece_bytes / 1024:g} KiB, {first.num_bytes / 1e6:.0f} MB"
    )
    table = Table("link", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
    table.columns[0].no_wrap = True
    for column in ("at once", "GB/s", "low – high", "of memcpy", "of limit", "rounds"):
        table.add_column(column, justify="right", no_wrap=True)
    for series in of_shape:
        table.add_row(*_rate_row(report, series))
    return table


def _left_out(skipped: list[Skipped]) -> list[RenderableType]:
    """Arms with the same reason together."""
    arms: dict[tuple[bool, str], list[str]] = {}
    for one in skipped:
        arms.setdefault((one.is_failure, one.reason), []).append(ARMS[one.arm].title)
    return [
        Text(
            f"{', '.join(titles)} {'failed' if is_failure else 'not measured'}: {reason}",
            style="red" if is_failure else "dim",
        )
        for (is_failure, reason), titles in arms.items()
    ]


def _rate_row(report: Report, series: Series) -> list[str | Text]:
    kind = ARMS[series.arm]
    rates = series.gb_per_s
    return [
        Text(kind.title, style="cyan" if kind.is_link else ""),
        str(series.concurrent) if kind.is_concurrent else "",
        f"{rates.median:.2f}",
        f"{rates.low:.2f} – {rates.high:.2f}",
        _times(report.ratio(series, "cudaMemcpy" if "cudaMemcpy" in (kind.name, kind.limit) else "memcpy")),
        _times(report.ratio(series, kind.limit)),
        str(len(series.seconds)),
    ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _fairness(measured: list[Fairness]) -> Table:
    large = f"{measured[0].large_bytes / (1 << 30):.3g} GiB"
    title = f"{measured[0].model}: one block over an idle link, and behind a transfer of {large}; milliseconds"
    table = Table("link", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
    for column in ("alone", "low – high", "behind", "low – high", "times", "large one, s"):
        table.add_column(column, justify="right", no_wrap=True)
    for fairness in measured:
        alone, behind = (Spread.of([value * 1e3 for value in each]) for each in (fairness.alone_s, fairness.behind_s))
        table.add_row(
            fairness.link,
            f"{alone.median:.1f}",
            f"{alone.low:.1f} – {alone.high:.1f}",
            f"{behind.median:.1f}",
            f"{behind.low:.1f} – {behind.high:.1f}",
            str(len(fairness.behind_s)),
            f"{Spread.of(fairness.large_s).median:.2f}",
        )
    return table
