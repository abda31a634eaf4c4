"""One HTML file with everything in it."""

import math
from html import escape

from lab.experiments.plots import Pictures
from lab.experiments.prediction import cells
from lab.experiments.results import Results, Run
from lab.load.summary import ClassSummary, Spread

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } caption { text-align: left; color: #555; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
tr.best td { font-weight: 600; } p.note { color: #555; } svg { max-width: 100%; height: auto; }
"""


_SHAPES = (
    "Every step of the teaching servers; of all others, four samples per second of what their engines say they run. A "
    "cluster counts a request in both of its workers while its prompt is computed: running at one, waiting at another."
)


def html(results: Results) -> str:
    """The report."""
    pictures = Pictures(results)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(results.title)}</title>",
        f"<style>{_STYLE}</style><h1>{escape(results.title)}</h1>",
        f"<p>{escape(results.about)}</p>" if results.about else "",
        _note(f"{results.model} on {results.machine}, {results.began}. {_load(results)}"),
        "<h2>Who kept both promises</h2>",
        pictures.goodput(),
        _goodput(results),
        _table(results),
        "<h2>Times to first token, and gaps between tokens</h2>",
        _note(
            "Further left is better, on both sides. Dashed lines are the limits. Left: a curve that ends below 100 % "
            "tells of requests that failed. Right: where a curve crosses the dotted line is the gap that one in a "
            "hundred exceeds; tokens that came in one piece count as 1 ms apart."
        ),
        pictures.distributions(),
        "<h2>How it went over time</h2>",
        _note(
            "A dot is a request (left) or a gap between two tokens (right). Red lines are requests that failed, "
            "dashed lines the limits."
        ),
        pictures.timeline(),
    ]
    if shapes := pictures.shapes():
        parts += ["<h2>What was computed together</h2>", _note(_SHAPES), shapes]
    if moved := pictures.moved():
        parts += ["<h2>What separating cost</h2>", moved]
    if results.predictions:
        parts += ["<h2>What the simulator would have said</h2>", _predictions(results)]
    parts += [
        _note(f"{name} {'was cut short' if results.of(name) else 'did not run'}: {why}")
        for name, why in results.skipped.items()
    ]
    return "\n".join(parts) + "</html>\n"


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>"


def _load(results: Results) -> str:
    classes = {(w.name, w.prompt_tokens, w.output_tokens, w.ttft_s, w.itl_s): w for w in results.runs[0].classes}
    texts = [
        f"{w.name}: {w.rate_per_s:g} per second of {w.prompt_tokens} tokens in and {w.output_tokens} out"
        + (f", TTFT at most {w.ttft_s:g} s" if w.ttft_s is not None else "")
        + (f", 99 % of a request's gaps at most {w.itl_s * 1000:g} ms" if w.itl_s is not None else "")
        for w in classes.values()
    ]
    return "; ".join(texts) + "."


def _goodput(results: Results) -> str:
    """The highest rates found, and their ratios to the first arm's."""
    if not results.goodput:
        return ""
    first = _middle(next(iter(results.goodput.values())))
    rows = []
    for arm, (low, high) in results.goodput.items():
        found = _middle((low, high))
        ratio = f"{found / first:.2f}" if first and found else "-"
        between = f"{low:.2f} to {high:.2f}" if math.isfinite(high) else f"over {low:.2f}"
        rows.append(f"<tr><td>{escape(arm)}</td><td>{between}</td><td>{ratio}</td></tr>")
    caption = "The highest factor on the arrival rate at which enough requests keep both limits, and its ratio."
    head = "<tr><th>arm</th><th>factor</th><th>ratio to the first</th></tr>"
    return f"<table><caption>{caption}</caption>{head}{''.join(rows)}</table>"


def _predictions(results: Results) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.arm)}</td><td>{each.rate:.3g}</td><td>{each.seed}</td><td>{escape(each.kind)}</td>"
        + "".join(f"<td>{cell}</td>" for cell in cells(each))
        + f"<td>{'fitted to it' if each.fitted_on else 'foretold'}</td></tr>"
        for each in results.predictions
    )
    names = ("arm", "rate", "seed", "class", "TTFT p50, s", "gap p50, ms", "within both", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    caption = (
        "Measured / simulated (error). What a step costs is fitted to the first run of each arm, by least squares; the "
        "other runs are simulated with it, with the proxy's own scheduler."
    )
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table>"


def _middle(bounds: tuple[float, float]) -> float:
    low, high = bounds
    return math.sqrt(low * high) if low and math.isfinite(high) else low


def _table(results: Results) -> str:
    heads = (
        "arm", "rate", "class", "offered", "whole", "within both", "TTFT p50 / p99, s", "gap p50 / p99, ms", "tokens/s",
    )  # fmt: skip
    rows = []
    for arm in results.arms:
        for rate in sorted({run.rate for run in results.of(arm)}):
            run = results.of(arm, rate)[0]
            rows += [_row(results, run, summary) for summary in _shown(run)]
    return (
        "<table><caption>The first run of each arm and rate; all of them are in the CSV.</caption><tr>"
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr>"
        + "".join(rows)
        + "</table>"
    )


def _shown(run: Run) -> list[ClassSummary]:
    return run.summary.classes if len(run.summary.classes) == 1 else [*run.summary.classes, run.summary.total]


def _row(results: Results, run: Run, row: ClassSummary) -> str:
    totals = [r.summary.total.attained or 0.0 for r in results.runs if r.rate == run.rate]
    is_best = row is run.summary.total and (row.attained or 0.0) >= max(totals) > 0
    cells = (
        escape(run.arm), f"{run.rate:.3g}", escape(row.name), str(row.offered), str(row.whole),
        f"{100 * row.attained:.0f} %" if row.attained is not None else "-", _pair(row.ttft_s, 1, 2),
        _pair(row.itl_s, 1000, 0), f"{row.tokens_per_s:.1f}",
    )  # fmt: skip
    return f"<tr{' class=best' if is_best else ''}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _pair(spread: Spread, factor: float, digits: int) -> str:
    if spread.p50 is None or spread.p99 is None:
        return "-"
    return f"{spread.p50 * factor:.{digits}f} / {spread.p99 * factor:.{digits}f}"
