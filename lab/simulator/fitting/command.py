"""`twinpool lab simulate --fit RUN`: with the costs of a run that was measured here."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from lab.experiments.prediction import Prediction, cells
from lab.experiments.results import Results, Run, Setup
from lab.load.plan import Session
from lab.load.summary import summarize
from lab.load.table import tables
from lab.load.work import WorkClass
from lab.simulator.costs import FittedCosts
from lab.simulator.fitting.fit import FitError, fit_costs
from lab.simulator.fitting.measured import read_run
from lab.simulator.fitting.predict import predict, simulate


def run_fitted(
    path: Path,
    arm: str,
    setup: Setup | None,
    classes: Sequence[WorkClass],
    sessions: Sequence[Session],
    json_file: Path | None,
) -> int:
    """Returns 0, or raises `FitError`.

    Without `sessions`: how well every arm's first run foretells its others, or itself if it is alone. With them: what
    the servers of `arm` would make of these. `setup` replaces that of the run.
    """
    results = read_run(path, setup, classes)
    runs = _fittable(results, arm)
    out = Console(highlight=False)
    if sessions:
        run, its_setup = runs[0]
        return _play(run, setup or its_setup, its_setup, classes, sessions, json_file, out)
    found: list[Prediction] = []
    for run, its_setup in runs:
        costs = fit_costs(run.records, its_setup)
        out.print(f"{run.arm}: {describe(costs)}", soft_wrap=True)
        for other in results.of(run.arm):
            found += predict(costs, other, its_setup, fitted_on=other is run)
    out.print(table(found))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return 0


def _play(
    run: Run,
    setup: Setup,
    measured_setup: Setup,
    classes: Sequence[WorkClass],
    sessions: Sequence[Session],
    json_file: Path | None,
    out: Console,
) -> int:
    costs = fit_costs(run.records, measured_setup)
    records = simulate(costs, setup, classes, sessions)
    seconds = max(record.planned_s + record.end_to_end_s for record in records)
    summary = summarize(classes, records, seconds)
    what = f"{setup.replicas} servers" if setup.replicas else f"{setup.num_prefill}P{setup.num_decode}D"
    out.print(f"Simulated: {what} that cost what {run.arm} did: {describe(costs)}", soft_wrap=True)
    out.print(tables(summary))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return 0


def _fittable(results: Results, arm: str) -> list[tuple[Run, Setup]]:
    """The first run of each arm that tells what its engines cost, or of the one that is named."""
    known = [(run, run.setup) for name in results.arms if (run := results.of(name)[0]).setup is not None]
    found = [(run, setup) for run, setup in known if setup is not None and arm in ("", run.arm)]
    if not found:
        names = ", ".join(run.arm for run, _ in known) or "none"
        raise FitError(f"{results.title} has no arm {arm!r} that engines served; there are: {names}")
    return found


def describe(costs: FittedCosts) -> str:
    """In milliseconds and microseconds."""
    engine = costs.engine
    return (
        f"a step takes {engine.base_s * 1e3:.2f} ms, {engine.token_s * 1e3:.3f} ms more per token of a prompt, "
        f"{engine.pair_s * 1e6:.3f} µs per pair of them, {engine.sequence_s * 1e3:.3f} ms per sequence, "
        f"{engine.kv_token_s * 1e6:.2f} µs per token of KV; a first token {costs.first_token_s * 1e3:.1f} ms besides, "
        f"a hand-over {costs.handover_s * 1e3:.1f} ms"
    )


def table(found: Sequence[Prediction]) -> Table:
    """Measured, simulated and by how much that is off."""
    shown = Table("arm", "rate", "seed", "class", "TTFT p50, s", "ITL p50, ms", "within both", "", box=None)
    for each in found:
        shown.add_row(
            each.arm,
            f"{each.rate:.3g}",
            str(each.seed),
            each.kind,
            *cells(each),
            "fitted to it" if each.fitted_on else "",
        )
    return shown
