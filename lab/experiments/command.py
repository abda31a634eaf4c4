"""`twinpool lab run`: an experiment by name or file, into a directory with a report."""

import asyncio
import importlib.util
import os
import platform
import signal
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.console import Console

from cluster.embedded_model import EMBEDDED_MODEL_NAME, EmbeddedModelError, ensure_embedded_model
from cluster.preflight.machine import Machine, detect_machine
from lab.experiments.experiment import ExperimentError, load_experiment
from lab.experiments.report import html
from lab.experiments.results import Results, write_csv
from lab.experiments.run import run_experiment

_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130


def run_lab(*, name: str, directory: Path | None) -> int:
    """Returns the exit status: 1 when an arm did not run, 130 after Ctrl-C. What was measured is written anyway."""
    errors = Console(stderr=True, highlight=False)
    try:
        experiment = load_experiment(name)
        for library in ("matplotlib", "simpy"):
            if importlib.util.find_spec(library) is None:
                raise ExperimentError(f"the report needs {library}: install twinpool with the extra `lab`")
        # Absolute: the servers run in a directory of their own.
        given = experiment.model and str(Path(experiment.model).expanduser().absolute())
        model = given or str(asyncio.run(ensure_embedded_model(lambda _step: None)))
        out = directory or Path(f"lab-{Path(name).stem}-{datetime.now().astimezone():%Y%m%d-%H%M%S}")
        out.mkdir(parents=True, exist_ok=True)
    except (ExperimentError, EmbeddedModelError, OSError) as error:
        errors.print(f"twinpool: {error}", style="red", markup=False, soft_wrap=True)
        return _EXIT_USAGE
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    machine = detect_machine()
    results = Results(
        title=experiment.title,
        about=experiment.about.strip(),
        model=Path(experiment.model).name if experiment.model else EMBEDDED_MODEL_NAME,
        machine=_describe(machine),
        began=f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
        runs=[],
    )
    status = 0
    try:
        run_experiment(experiment, model, machine, out, results, lambda text: errors.print(text, style="dim"))
        status = _EXIT_FAILED if results.skipped else 0
    except KeyboardInterrupt:
        errors.print("twinpool: interrupted; every server that was started has ended", style="red")
        status = _EXIT_INTERRUPTED
    except ExperimentError as error:
        errors.print(f"twinpool: {error}", style="red", markup=False, soft_wrap=True)
        return _EXIT_FAILED
    if results.runs:
        from lab.simulator.fitting.predict import predictions  # simpy is not always installed

        results.predictions, why_not = predictions(results)
        for arm, why in why_not.items():
            errors.print(f"{arm} was not simulated: {why}", style="dim", markup=False, soft_wrap=True)
        write_results(results, out)
        Console(highlight=False).print(f"{out / 'report.html'}", soft_wrap=True)
    return status


def write_results(results: Results, out: Path) -> None:
    """`report.html`, `runs.csv` and `results.json`."""
    (out / "results.json").write_bytes(msgspec.json.encode(results))
    write_csv(results, out / "runs.csv")
    (out / "report.html").write_text(html(results), encoding="utf-8")


def _describe(machine: Machine) -> str:
    devices = f"{len(machine.gpus)} GPUs" if machine.gpus else f"{len(machine.cores)} cores"
    return f"{devices}, {platform.machine()}, load {os.getloadavg()[0]:.1f} before"


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
