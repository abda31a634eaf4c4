"""The report as a picture: a panel of rates per shape, and one of single blocks behind a large transfer."""

import importlib.util
from pathlib import Path
from typing import Any

from lab.links.arms.kinds import ARMS
from lab.links.report import Report, Series, Spread

_LIMIT_COLOUR = "#bbbbbb"
_LINK_COLOURS = ("#4477aa", "#99c6ee")
"""One transfer, and several at once."""
_RIVAL_COLOURS = ("#cc7733", "#f0c29a")
_BEHIND_COLOUR = "#cc6677"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(report: Report, path: Path) -> None:
    """The ending of `path` decides the format. Raises ValueError for one that matplotlib does not know."""
    from matplotlib.figure import Figure  # takes a second, and is not always installed

    models = [shape.model for shape in report.shapes if any(s.model == shape.model for s in report.series)]
    num_panels = len(models) + bool(report.fairness)
    figure = Figure(figsize=(6.2 * max(1, min(2, num_panels)), 4.2 * max(1, -(-num_panels // 2))), layout="constrained")
    panels = figure.subplots(max(1, -(-num_panels // 2)), max(1, min(2, num_panels)), squeeze=False).flat
    for model in models:
        _rates(next(panels), report, model)
    if report.fairness:
        _fairness(next(panels), report)
    for unused in panels:
        unused.set_axis_off()
    machine = report.machine
    figure.suptitle(
        f"KV blocks between two processes, {machine.cores} cores, load {machine.load_before:.1f}: "
        "median, lowest and highest of the rounds",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)


def _rates(axes: Any, report: Report, model: str) -> None:
    """Horizontal bars, the slowest work at the bottom of each group."""
    series = [one for one in report.series if one.model == model]
    arms = list(dict.fromkeys(one.arm for one in series))
    ticks = []
    y = 0.0
    for arm in arms:
        bars = [one for one in series if one.arm == arm]
        ticks.append(y + 0.4 * (len(bars) - 1) / 2)
        for bar in bars:
            _bar(axes, y, bar)
            y += 0.4
        y += 0.35
    axes.set_yticks(ticks, [ARMS[arm].title for arm in arms])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    shape = next(shape for shape in report.shapes if shape.model == model)
    axes.set_title(
        f"{model}: {series[0].num_bytes / 1e6:.0f} MB in pieces of {shape.piece_bytes / 1024:g} KiB", fontsize=10
    )
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlim(0, 1.14 * max(one.gb_per_s.high for one in series))
    axes.legend(handles=_legend(series), fontsize=8, loc="lower right")


def _colour(series: Series) -> str:
    kind = ARMS[series.arm]
    if not kind.is_concurrent:
        return _LIMIT_COLOUR
    return (_RIVAL_COLOURS if kind.is_rival else _LINK_COLOURS)[series.concurrent > 1]


def _bar(axes: Any, y: float, series: Series) -> None:
    rates = series.gb_per_s
    spread = [[rates.median - rates.low], [rates.high - rates.median]]
    error = {"elinewidth": 1, "capsize": 2}
    axes.barh([y], [rates.median], height=0.36, color=_colour(series), xerr=spread, error_kw=error)
    axes.annotate(f" {rates.median:.2f}", (rates.high, y), va="center", fontsize=7)


def _legend(series: list[Series]) -> list[Any]:
    from matplotlib.patches import Patch

    labels: dict[str, str] = {}
    for one in series:
        kind = ARMS[one.arm]
        whose = "another library" if kind.is_rival else "a link of twinpool"
        how_many = "one transfer" if one.concurrent == 1 else f"{one.concurrent} at once"
        labels[_colour(one)] = f"{whose}, {how_many}" if kind.is_concurrent else "a bare copy: the limit"
    return [Patch(color=colour, label=label) for colour, label in labels.items()]


def _fairness(axes: Any, report: Report) -> None:
    for place, fairness in enumerate(report.fairness):
        for offset, colour, values in (
            (-0.12, _LINK_COLOURS[0], fairness.alone_s),
            (0.12, _BEHIND_COLOUR, fairness.behind_s),
        ):
            milliseconds = [value * 1e3 for value in values]
            jitter = [place + offset + 0.06 * ((index * 7) % 11 - 5) / 5 for index in range(len(values))]
            axes.plot(jitter, milliseconds, ".", color=colour, alpha=0.5, markersize=5)
            median = Spread.of(milliseconds).median
            axes.plot([place + offset - 0.1, place + offset + 0.1], [median, median], "-", color=colour, linewidth=2)
            axes.annotate(f"{median:.1f} ms", (place + offset + (0.11 if offset > 0 else -0.11), median),
                          ha="left" if offset > 0 else "right", va="center", fontsize=8)  # fmt: skip
    axes.set_xticks(range(len(report.fairness)), [fairness.link for fairness in report.fairness])
    axes.set_xlim(-0.6, len(report.fairness) - 0.4)
    axes.set_yscale("log")
    for axis_part in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis_part(lambda value, _position: f"{value:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_ylabel("ms until the block is there")
    axes.grid(axis="y", alpha=0.3)
    large = report.fairness[0].large_bytes / (1 << 30)
    axes.set_title(f"One block of {report.fairness[0].model}, alone and behind {large:.3g} GiB", fontsize=10)
    handles = [
        axes.plot([], [], "-", color=_LINK_COLOURS[0], label="alone")[0],
        axes.plot([], [], "-", color=_BEHIND_COLOUR, label="behind the large one")[0],
    ]
    axes.legend(handles=handles, fontsize=8, loc="center left")
