"""A sweep as a picture: TTFT against gaps, the front, and who keeps both limits."""

from collections.abc import Sequence
from pathlib import Path

from lab.simulator.sweep import Point, front


def save_plot(points: Sequence[Point], title: str, path: Path) -> None:
    """The ending of `path` decides the format. Raises ValueError for one that matplotlib does not know."""
    from matplotlib.figure import Figure  # takes a second, and is not always installed

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    shown = [point for point in points if point.ttft_s < float("inf")]
    dots = axes.scatter(
        [point.ttft_s for point in shown],
        [point.itl_s * 1000 for point in shown],
        c=[100 * point.attained for point in shown],
        cmap="viridis", vmin=0, vmax=100, s=36, edgecolors="#444444", linewidths=0.5, zorder=3,
    )  # fmt: skip
    best = front(shown)
    axes.plot([p.ttft_s for p in best], [p.itl_s * 1000 for p in best], color="#aa3377", linewidth=1.2, zorder=2)
    for point in best:
        axes.annotate(
            f"{point.pools.num_prefill}x{point.pools.prefill_tp} + {point.pools.num_decode}x{point.pools.decode_tp}",
            (point.ttft_s, point.itl_s * 1000), xytext=(5, 5), textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.set_xlabel("TTFT, 90th percentile, s")
    axes.set_ylabel("gaps between tokens, 99th percentile, ms")
    axes.grid(alpha=0.3, which="both")
    axes.set_title(f"{title}\nprefill workers x ranks + decode workers x ranks; the line joins the best", fontsize=10)
    figure.colorbar(dots, label="% of requests within both limits")
    figure.savefig(path, dpi=120)
