"""`twinpool lab tune`: computes the guide's tables again, and takes the measured one from a run if it is given one."""

from pathlib import Path

import msgspec
from rich.console import Console

from lab.experiments.results import Results
from lab.output_file import why_unwritable
from lab.tuning.guide import measured_part, write_guide
from lab.tuning.measured import measured_table

_EXIT_USAGE = 2


def run_tune(run: Path | None, out: Path) -> int:
    """Returns the exit status. Without `run` the measured table of `out` stays."""
    errors = Console(stderr=True, highlight=False)
    try:
        if complaint := why_unwritable("--out", out):
            raise ValueError(complaint)
        before = out.read_text(encoding="utf-8") if out.is_file() else ""
        measured = measured_part(before) if run is None else measured_table(_read(run))
    except ValueError as error:
        errors.print(f"twinpool: {error}", style="red", markup=False, soft_wrap=True)
        return _EXIT_USAGE
    out.write_text(write_guide(measured), encoding="utf-8")
    Console(highlight=False).print(str(out), soft_wrap=True)
    return 0


def _read(run: Path) -> Results:
    """Raises `ValueError`."""
    file = run / "results.json" if run.is_dir() else run
    try:
        results = msgspec.json.decode(file.read_bytes(), type=Results)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; name the directory of `twinpool lab run`") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} holds no results of `twinpool lab run`: {error}") from error
    if not results.runs:
        raise ValueError(f"{file} holds no run; see its log for why no arm ran")
    return results
