"""The measured table: an experiment of which each arm changes one setting."""

from lab.experiments.results import Results, Run
from lab.load.summary import ClassSummary
from lab.tuning.markdown import count, ms, percent, table

HEADS = (
    "arm", "KV blocks at D", "memory touched, GB", "lost their blocks", "cached", "at once, most", "waiting, most",
    "TTFT p50 / p99, ms", "gap p50 / p99, ms", "token 1 to 2, ms", "KV moved, MB", "within limits",
)  # fmt: skip


def measured_table(results: Results) -> str:
    """A row per arm, of its first run, and what it was measured on."""
    rows = [_row(results.of(arm)[0]) for arm in results.arms]
    skipped = [f"{arm} did not run: {why.splitlines()[0]}" for arm, why in results.skipped.items()]
    about = f"{results.model} on {results.machine.partition(', load')[0]}, {results.began}; {_load(results.runs[0])}."
    return "\n\n".join([about, table(HEADS, rows), *skipped])


def _load(run: Run) -> str:
    texts = (
        f"{work.rate_per_s * run.rate:g} {work.name}s per second of {work.prompt_tokens} tokens in, "
        f"{work.shared_tokens} of them the same in all, and {work.output_tokens} out"
        for work in run.classes
    )
    return ", and ".join(texts)


def _row(run: Run) -> list[str]:
    total, held = run.summary.total, run.held
    cached = held.cached_tokens / held.prompt_tokens if held and held.prompt_tokens else None
    return [
        run.arm,
        count(held.kv_blocks) if held else "-",
        f"{held.memory_bytes / 1e9:.1f}" if held else "-",
        count(held.preemptions) if held else "-",
        percent(cached),
        str(max((shape.sequences for shape in run.shapes), default=0)),
        str(max((shape.waiting for shape in run.shapes), default=0)),
        _both(total),
        f"{ms(total.itl_s.p50)} / {ms(total.itl_s.p99)}",
        ms(total.second_gap_s.p50),
        count(run.kv_bytes / 1e6),
        percent(total.attained),
    ]


def _both(row: ClassSummary) -> str:
    return f"{ms(row.ttft_s.p50)} / {ms(row.ttft_s.p99)}"
