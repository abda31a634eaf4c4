"""The pictures of a report, as SVG text. Arms keep their colour in all of them."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.experiments.results import Results, Run

_COLOURS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#777777", "#000000")
_GOOD, _BAD = "#2b7a3b", "#b03030"
_MARKERS = ("o", "^", "s", "D")
"""Of kinds of requests, where several are in one picture."""
_SHORTEST_MS = 1.0


class Pictures:
    """One set of pictures for one experiment."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._colour = {arm: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(results.arms)}
        self._kinds = list(dict.fromkeys(work.name for run in results.runs for work in run.classes))

    def _limits_of(self, kind: str) -> tuple[set[float], set[float]]:
        """Of TTFT in seconds, and of gaps in milliseconds."""
        classes = [work for run in self._results.runs for work in run.classes if work.name == kind]
        return (
            {work.ttft_s for work in classes if work.ttft_s is not None},
            {work.itl_s * 1000 for work in classes if work.itl_s is not None},
        )

    def goodput(self) -> str:
        """Share of requests within both limits: by rate, or bars per arm at the only rate."""
        return self._goodput_by_rate() if len(self._results.rates) > 1 else self._goodput_bars()

    def _goodput_by_rate(self) -> str:
        figure, axes = _figure(7.5, 3.4)
        for arm in self._results.arms:
            points = [(rate, _attained(self._results.of(arm, rate))) for rate in self._results.rates]
            known = [(rate, share) for rate, share in points if share is not None]
            axes.plot(*zip(*known, strict=True), "o-", color=self._colour[arm], label=arm) if known else None
        axes.set_xscale("log")
        axes.set_xticks(self._results.rates, [f"{rate:.2g}" for rate in self._results.rates], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("factor on the arrival rate")
        axes.set_ylabel("% of requests within both limits")
        axes.set_ylim(0, 103)
        axes.axhline(90, color=_GOOD, linewidth=1, linestyle="--")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        return _svg(figure)

    def _goodput_bars(self) -> str:
        """One bar per arm, and thin ones per kind of request where there are several."""
        kinds = self._kinds if len(self._kinds) > 1 else []
        figure, axes = _figure(7.5, 0.7 + (0.5 + 0.22 * len(kinds)) * len(self._results.arms))
        ticks = []
        place = 0.0
        for arm in self._results.arms:
            runs = self._results.of(arm)
            share = _attained(runs) or 0.0
            ticks.append(place)
            axes.barh(place, share, color=self._colour[arm], height=0.56)
            axes.annotate(f" {share:.0f} %", (share, place), va="center", fontsize=9)
            place += 0.4
            for kind in kinds:
                part = _attained(runs, kind)
                if part is not None:
                    axes.barh(place, part, color=self._colour[arm], height=0.18, alpha=0.45)
                    axes.annotate(f" {kind} {part:.0f} %", (part, place), va="center", fontsize=7, color="#555555")
                    place += 0.22
            place += 0.45
        axes.set_yticks(ticks, self._results.arms)
        axes.invert_yaxis()
        axes.set_xlim(0, 118)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("% of requests that came whole and within both limits")
        axes.grid(alpha=0.3, axis="x")
        return _svg(figure)

    def distributions(self) -> str:
        """A row per kind of request: TTFT as shares of all requests, gaps as shares of gaps that are longer."""
        figure, grid = _figure(10, 0.5 + 2.7 * len(self._kinds), len(self._kinds), 2, sharex="col", squeeze=False)
        for (left, right), kind in zip(grid, self._kinds, strict=True):
            for arm in self._results.arms:
                records = [r for run in self._results.nearest_to_one(arm) for r in run.records if r.work == kind]
                whole = [record for record in records if not record.error]
                _cumulate(left, [r.ttft_s for r in whole if r.ttft_s is not None], len(records), self._colour[arm], arm)
                _exceed(right, [_ms(gap) for r in whole for gap in r.gaps_s], self._colour[arm])
            ttfts, gaps = self._limits_of(kind)
            _limits(left, ttfts, "s")
            _limits(right, gaps, "ms")
            left.set_title(kind, fontsize=10, loc="left")
            left.set_ylabel("% of requests that\nbegan within that", fontsize=9)
            left.set_ylim(0, 101)
            right.set_ylabel("% of gaps that\nare longer", fontsize=9)
            right.set_yscale("log")
            right.set_ylim(0.05, 110)
            right.axhline(1, color="#777777", linewidth=0.8, linestyle=":")
            _plain_numbers(right.yaxis)
            for axes in (left, right):
                axes.set_xscale("log")
                _plain_numbers(axes.xaxis)
                axes.grid(alpha=0.3)
        grid[-1][0].set_xlabel("time to first token, s")
        grid[-1][1].set_xlabel("gap between tokens, ms")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
        return _svg(figure)

    def timeline(self) -> str:
        """One row per arm: the TTFT of each request when it was sent, and each gap when it ended."""
        arms = self._results.arms
        figure, grid = _figure(10, 1.7 * len(arms) + 0.6, len(arms), 2, sharex=True, sharey="col", squeeze=False)
        for row, arm in zip(grid, arms, strict=True):
            run = self._results.nearest_to_one(arm)[0]
            for record in run.records:
                if record.error:
                    row[0].axvline(record.sent_s, color=_BAD, linewidth=0.6, alpha=0.6)
            for kind, marker in zip(self._kinds, itertools.cycle(_MARKERS), strict=False):
                whole = [record for record in run.records if not record.error and record.work == kind]
                ttft = [(r.sent_s, r.ttft_s) for r in whole if r.ttft_s is not None]
                gaps = [point for r in whole for point in _gap_points(r.sent_s, r.ttft_s, r.gaps_s)]
                for axes, points, size in ((row[0], ttft, 4.5), (row[1], gaps, 1.8)):
                    if points:
                        axes.plot(
                            *zip(*points, strict=True), marker, color=self._colour[arm], markersize=size,
                            alpha=0.7, markeredgewidth=0, label=kind,
                        )  # fmt: skip
                ttfts, limits = self._limits_of(kind)
                _limits(row[0], ttfts, "s", across=True)
                _limits(row[1], limits, "ms", across=True)
            row[0].set_title(arm, fontsize=9, loc="left")
            row[0].set_ylabel("TTFT, s", fontsize=8)
            row[1].set_ylabel("gap, ms", fontsize=8)
            for axes in row:
                axes.set_yscale("log")
                _plain_numbers(axes.yaxis)
                axes.grid(alpha=0.3)
            if len(self._kinds) > 1 and row[0].get_legend_handles_labels()[0]:
                row[0].legend(fontsize=7, loc="upper right", handletextpad=0.1, framealpha=0.6)
        for axes in grid[-1]:
            axes.set_xlabel("seconds from the start of the load", fontsize=8)
        return _svg(figure)

    def shapes(self) -> str:
        """One row per arm: how many sequences were computed at a time."""
        runs = [run for arm in self._results.arms if (run := self._results.nearest_to_one(arm)[0]).shapes]
        if not runs:
            return ""
        figure, grid = _figure(10, 1.3 * len(runs) + 0.5, len(runs), 1, sharex=True, sharey=True, squeeze=False)
        for (axes,), run in zip(grid, runs, strict=True):
            at = [shape.at_s for shape in run.shapes]
            axes.fill_between(
                at, [s.sequences for s in run.shapes], step="post", color=self._colour[run.arm], alpha=0.6,
                linewidth=0, label="computed at once",
            )  # fmt: skip
            waiting = [s.waiting for s in run.shapes]
            axes.plot(at, waiting, color="#333333", linewidth=0.9, drawstyle="steps-post", label="waiting")
            axes.set_title(run.arm, fontsize=9, loc="left")
            axes.set_ylabel("requests", fontsize=8)
            axes.set_ylim(bottom=0)
            axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
            axes.grid(alpha=0.3)
            if run is runs[0]:
                axes.legend(fontsize=7, loc="upper right", framealpha=0.6, ncols=2)
        grid[-1][0].set_xlabel("seconds from the start of the load", fontsize=8)
        return _svg(figure)

    def moved(self) -> str:
        """KV bytes between pools, per arm that moved any."""
        arms = [arm for arm in self._results.arms if any(run.kv_bytes for run in self._results.of(arm))]
        if not arms:
            return ""
        figure, axes = _figure(7.5, 0.9 + 0.45 * len(arms))
        for place, arm in enumerate(arms):
            runs = self._results.nearest_to_one(arm)
            megabytes = sum(run.kv_bytes for run in runs) / len(runs) / 1e6
            axes.barh(place, megabytes, color=self._colour[arm], height=0.6)
            axes.annotate(f" {megabytes:,.0f} MB", (megabytes, place), va="center", fontsize=9)
        axes.set_yticks(range(len(arms)), arms)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("KV moved between pools per run, MB")
        return _svg(figure)


def _attained(runs: Sequence[Run], kind: str = "") -> float | None:
    """Per cent of all requests of some runs, or of those of one kind."""
    rows = [row for run in runs for row in (run.summary.classes if kind else [run.summary.total])]
    rows = [row for row in rows if not kind or row.name == kind]
    goods = [row.good for row in rows]
    offered = sum(row.offered for row in rows)
    if not offered or None in goods:
        return None
    return 100 * sum(good or 0 for good in goods) / offered


def _ms(gap_s: float) -> float:
    """Tokens that came in one piece are drawn as `_SHORTEST_MS` apart, or they would fill half of the picture."""
    return max(_SHORTEST_MS, gap_s * 1000)


def _gap_points(sent_s: float, ttft_s: float | None, gaps_s: Sequence[float]) -> list[tuple[float, float]]:
    ends = sent_s + (ttft_s or 0.0) + np.cumsum(gaps_s)
    return [(float(end), _ms(gap)) for end, gap in zip(ends, gaps_s, strict=True)]


def _cumulate(axes: Any, values: Sequence[float], offered: int, colour: str, label: str) -> None:
    """Of all that were offered: a curve that ends below 100 % tells of failed ones."""
    ordered = np.sort(np.asarray(values, dtype=float))
    shares = np.arange(1, len(ordered) + 1) / max(1, offered) * 100
    axes.step(ordered, shares, where="post", color=colour, label=label, linewidth=1.5)


def _exceed(axes: Any, values: Sequence[float], colour: str) -> None:
    ordered = np.sort(np.asarray(values, dtype=float))
    shares = np.arange(len(ordered) - 1, -1, -1) / max(1, len(ordered)) * 100
    axes.step(ordered, shares, where="post", color=colour, linewidth=1.5)


def _limits(axes: Any, limits: set[float], unit: str, *, across: bool = False) -> None:
    for limit in limits:
        (axes.axhline if across else axes.axvline)(limit, color=_GOOD, linewidth=1, linestyle="--")
        if not across:
            axes.annotate(
                f" {limit:g} {unit}", (limit, 1), xycoords=("data", "axes fraction"), va="bottom", ha="center",
                fontsize=7, color=_GOOD,
            )  # fmt: skip


def _plain_numbers(axis: Any) -> None:
    """Of a logarithmic axis: no powers, and of what lies between them 2 and 5."""
    axis.set_major_formatter(lambda value, _place: f"{value:g}")
    axis.set_minor_formatter(lambda value, _place: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axis.set_tick_params(which="minor", labelsize=7)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
