"""Reads a run that was measured: an experiment's results, or the JSON lines of `twinpool lab load`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from lab.experiments.results import Results, Run, Setup
from lab.load.client import Record
from lab.load.summary import summarize
from lab.load.work import WorkClass
from lab.simulator.fitting.fit import FitError

LINES_ARM = "the run"
"""What the arm of JSON lines is called; they do not say."""


def read_run(path: Path, setup: Setup | None, classes: Sequence[WorkClass]) -> Results:
    """An experiment's directory or its `results.json`; or JSON lines, of servers set up as `setup`, held to `classes`.

    Raises `FitError`.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise FitError(
            f"cannot read {file}: {error.strerror}; name an experiment's directory or JSON lines of `twinpool lab load`"
        ) from error
    try:
        if file.suffix != ".jsonl":
            return msgspec.json.decode(content, type=Results)
        records = [msgspec.json.decode(line, type=Record) for line in content.splitlines() if line.strip()]
    except msgspec.DecodeError as error:
        raise FitError(
            f"{file} is neither an experiment's results.json nor JSON lines (.jsonl) of `twinpool lab load`: {error}"
        ) from error
    if setup is None:
        raise FitError(f"{file} does not tell how its servers were set up: give --pools (1x1+1x1) or --replicas")
    if not records:
        raise FitError(f"{file} holds no request")
    seconds = max(record.sent_s + record.end_to_end_s for record in records)
    known = {work.name: work for work in classes}
    found = [known.get(name) or _class_of(name, records, seconds) for name in sorted({r.work for r in records})]
    run = Run(LINES_ARM, "", 1.0, 0, found, summarize(found, records, seconds), records, setup=setup)
    return Results(str(file), "", "", "", "", [run])


def _class_of(name: str, records: Sequence[Record], seconds: float) -> WorkClass:
    """Without limits, of mean lengths."""
    mine = [record for record in records if record.work == name]
    prompt = sum(record.prompt_tokens for record in mine) // len(mine)
    return WorkClass(name, len(mine) / seconds, prompt, sum(record.output_tokens for record in mine) // len(mine))
