"""A sweep as a picture: TTFT against gaps, the front, who keeps both limits, and other limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.simulator.costs import Pools
from lab.simulator.sweep import Point, front

_COLOURS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#777777", "#000000")


def save_plot(
    points: Sequence[Point],
    title: str,
    path: Path,
    limits: tuple[float | None, float | None] = (None, None),
    factors: Sequence[float] = (),
    attained: Mapping[Pools, Sequence[float]] | None = None,
) -> None:
    """The ending of `path` decides the format. Raises ValueError for one that matplotlib does not know.

    `limits`: of TTFT and gaps, in seconds. `attained`: shares within limits that are `factors` times as long.
    """
    from matplotlib.figure import Figure  # takes a second, and is not always installed

    both = bool(attained)
    figure = Figure(figsize=(13 if both else 7.5, 5), layout="constrained")
    axes = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
    _front(figure, axes[0], points, limits)
    if attained:
        _scaled(axes[1], factors, attained)
    figure.suptitle(f"{title}\nprefill workers x ranks + decode workers x ranks", fontsize=11)
    figure.savefig(path, dpi=120)


def name_of(pools: Pools) -> str:
    """`3x4 + 1x8`."""
    return f"{pools.num_prefill}x{pools.prefill_tp} + {pools.num_decode}x{pools.decode_tp}"


def _front(figure: Any, axes: Any, points: Sequence[Point], limits: tuple[float | None, float | None]) -> None:
    shown = [point for point in points if point.ttft_s < float("inf")]
    dots = axes.scatter(
        [point.ttft_s for point in shown],
        [point.itl_s * 1000 for point in shown],
        c=[100 * point.attained for point in shown],
        cmap="viridis", vmin=0, vmax=100, s=36, edgecolors="#444444", linewidths=0.5, zorder=3,
    )  # fmt: skip
    best = front(shown)
    axes.plot(
        [p.ttft_s for p in best], [p.itl_s * 1000 for p in best], color="#aa3377", linewidth=1.2, zorder=2,
        label="nobody is faster at both",
    )  # fmt: skip
    for point in best:
        # Slanted: neighbours on the front are often close.
        axes.annotate(
            name_of(point.pools), (point.ttft_s, point.itl_s * 1000), xytext=(3, 5), textcoords="offset points",
            fontsize=8, rotation=40, rotation_mode="anchor",
        )  # fmt: skip
    ttft_s, itl_s = limits
    if ttft_s is not None:
        axes.axvline(ttft_s, color="#2b7a3b", linewidth=1, linestyle="--", label="limits")
    if itl_s is not None:
        axes.axhline(itl_s * 1000, color="#2b7a3b", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _place: f"{value:g}")
        axis.set_minor_formatter(lambda value, _place: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.margins(y=0.15)
    axes.set_xlabel("TTFT, 90th percentile, s")
    axes.set_ylabel("gaps between tokens, 99th percentile, ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.colorbar(dots, ax=axes, label="% of requests within both limits")


def _scaled(axes: Any, factors: Sequence[float], attained: Mapping[Pools, Sequence[float]]) -> None:
    for number, (pools, shares) in enumerate(attained.items()):
        percents = [100 * share for share in shares]
        axes.plot(factors, percents, "o-", color=_COLOURS[number % len(_COLOURS)], label=name_of(pools))
    axes.set_xscale("log")
    axes.set_xticks(factors, [f"{factor:g}" for factor in factors])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-2, 103)
    axes.axhline(90, color="#777777", linewidth=0.8, linestyle=":")
    axes.set_xlabel("both limits, times so much")
    axes.set_ylabel("% of requests within both limits")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
