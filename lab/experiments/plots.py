"""The pictures of a report, as SVG text. Arms keep their colour in all of them."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.experiments.results import Results, Run

_COLOURS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#777777", "#000000")
_GOOD, _BAD = "#2b7a3b", "#b03030"


class Pictures:
    """One set of pictures for one experiment."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._colour = {arm: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(results.arms)}

    def goodput(self) -> str:
        """Share of requests within both limits: by rate, or one bar per arm at the only rate."""
        figure, axes = _figure(7.5, 3.4 if len(self._results.rates) > 1 else 0.7 + 0.5 * len(self._results.arms))
        if len(self._results.rates) > 1:
            for arm in self._results.arms:
                points = [(rate, _attained(self._results.of(arm, rate))) for rate in self._results.rates]
                known = [(rate, share) for rate, share in points if share is not None]
                axes.plot(*zip(*known, strict=True), "o-", color=self._colour[arm], label=arm) if known else None
            axes.set_xlabel("factor on the arrival rate")
            axes.set_ylabel("% of requests within both limits")
            axes.set_ylim(0, 103)
            axes.axhline(90, color="#999999", linewidth=0.8, linestyle=":")
            axes.legend(fontsize=8)
        else:
            for place, arm in enumerate(self._results.arms):
                share = _attained(self._results.of(arm)) or 0.0
                axes.barh(place, share, color=self._colour[arm], height=0.6)
                axes.annotate(f" {share:.0f} %", (share, place), va="center", fontsize=9)
            axes.set_yticks(range(len(self._results.arms)), self._results.arms)
            axes.invert_yaxis()
            axes.set_xlim(0, 112)
            axes.set_xlabel("% of requests that came whole and within both limits")
        axes.grid(alpha=0.3)
        return _svg(figure)

    def distributions(self) -> str:
        """Of TTFT and of every gap, as shares of requests and of gaps below a time."""
        figure, (left, right) = _figure(10, 3.6, columns=2)
        for arm in self._results.arms:
            runs = self._results.nearest_to_one(arm)
            whole = [record for run in runs for record in run.records if not record.error]
            ttfts = [r.ttft_s for r in whole if r.ttft_s is not None]
            _cumulate(left, ttfts, self._colour[arm], arm)
            _cumulate(right, [gap * 1000 for r in whole for gap in r.gaps_s], self._colour[arm], arm)
        limits = [work for run in self._results.runs for work in run.classes]
        _limits(left, {work.ttft_s for work in limits if work.ttft_s is not None})
        _limits(right, {work.itl_s * 1000 for work in limits if work.itl_s is not None})
        left.set_xlabel("time to first token, s")
        left.set_ylabel("% of requests at most so long")
        right.set_xlabel("gap between tokens, ms")
        right.set_ylabel("% of gaps at most so long")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
            axes.grid(alpha=0.3, which="both")
            axes.set_ylim(0, 101)
        left.legend(fontsize=8, loc="lower right")
        return _svg(figure)

    def timeline(self) -> str:
        """One row per arm: the TTFT of each request when it was sent, and each gap when it ended."""
        arms = self._results.arms
        figure, grid = _figure(10, 1.7 * len(arms) + 0.4, rows=len(arms), columns=2, sharex=True, sharey="col")
        for row, arm in zip(np.atleast_2d(grid), arms, strict=True):
            run = self._results.nearest_to_one(arm)[0]
            whole = [record for record in run.records if not record.error]
            failed = [record for record in run.records if record.error]
            ttft = [(r.sent_s, r.ttft_s) for r in whole if r.ttft_s is not None]
            if ttft:
                row[0].plot(*zip(*ttft, strict=True), ".", color=self._colour[arm], markersize=5)
            for record in failed:
                row[0].axvline(record.sent_s, color=_BAD, linewidth=0.6, alpha=0.6)
            gaps = [point for record in whole for point in _gap_points(record.sent_s, record.ttft_s, record.gaps_s)]
            if gaps:
                row[1].plot(*zip(*gaps, strict=True), ".", color=self._colour[arm], markersize=2, alpha=0.5)
            _limits(row[0], {w.ttft_s for w in run.classes if w.ttft_s is not None}, across=True)
            _limits(row[1], {w.itl_s * 1000 for w in run.classes if w.itl_s is not None}, across=True)
            row[0].set_title(arm, fontsize=9, loc="left")
            row[0].set_ylabel("TTFT, s", fontsize=8)
            row[1].set_ylabel("gap, ms", fontsize=8)
            for axes in row:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
                axes.grid(alpha=0.3)
        for axes in np.atleast_2d(grid)[-1]:
            axes.set_xlabel("seconds from the start of the load", fontsize=8)
        return _svg(figure)

    def shapes(self) -> str:
        """One row per arm: how many sequences were computed at a time."""
        runs = [run for arm in self._results.arms if (run := self._results.nearest_to_one(arm)[0]).shapes]
        if not runs:
            return ""
        figure, grid = _figure(10, 1.3 * len(runs) + 0.4, rows=len(runs), sharex=True)
        for axes, run in zip(np.atleast_1d(grid), runs, strict=True):
            at = [shape.at_s for shape in run.shapes]
            axes.fill_between(
                at, [s.sequences for s in run.shapes], step="post", color=self._colour[run.arm], alpha=0.6
            )
            axes.plot(at, [s.waiting for s in run.shapes], color="#555555", linewidth=0.8, drawstyle="steps-post")
            axes.set_title(f"{run.arm}: sequences computed at once (filled), waiting (line)", fontsize=9, loc="left")
            axes.grid(alpha=0.3)
        np.atleast_1d(grid)[-1].set_xlabel("seconds from the start of the load", fontsize=8)
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


def _attained(runs: Sequence[Run]) -> float | None:
    """Per cent of all requests of some runs."""
    goods = [run.summary.total.good for run in runs]
    offered = sum(run.summary.total.offered for run in runs)
    if not offered or None in goods:
        return None
    return 100 * sum(good or 0 for good in goods) / offered


def _gap_points(sent_s: float, ttft_s: float | None, gaps_s: Sequence[float]) -> list[tuple[float, float]]:
    ends = sent_s + (ttft_s or 0.0) + np.cumsum(gaps_s)
    return [(float(end), gap * 1000) for end, gap in zip(ends, gaps_s, strict=True)]


def _cumulate(axes: Any, values: Sequence[float], colour: str, label: str) -> None:
    if values:
        ordered = np.sort(np.asarray(values))
        axes.plot(
            ordered, np.arange(1, len(ordered) + 1) / len(ordered) * 100, color=colour, label=label, linewidth=1.5
        )


def _limits(axes: Any, limits: set[float], *, across: bool = False) -> None:
    for limit in limits:
        (axes.axhline if across else axes.axvline)(limit, color=_GOOD, linewidth=1, linestyle="--")


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
