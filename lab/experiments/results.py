"""What runs gave: kept as JSON beside the report, and as CSV."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lab.experiments.prediction import Prediction
from lab.load.client import Record
from lab.load.summary import Summary
from lab.load.work import WorkClass


class StepShape(msgspec.Struct):
    """What an engine carried at one moment, or in one step."""

    at_s: float
    """From the start of the run."""
    sequences: int
    tokens: int = 0
    """Computed in the step, where each step is known."""
    waiting: int = 0


class Setup(msgspec.Struct):
    """What of an arm's servers decides how requests flow through them."""

    chunk_tokens: int
    """Of prompts in a step, at most."""
    replicas: int = 0
    """Plain servers side by side; 0: a cluster of two pools."""
    num_prefill: int = 0
    num_decode: int = 0
    remote_min_tokens: int = 0
    """Shorter prompts are computed by decode workers."""


class Held(msgspec.Struct):
    """What the servers of an arm held at the end of a run, and what their schedulers did in it."""

    memory_bytes: int = 0
    """Of all their processes, shared pages counted once."""
    kv_blocks: int = 0
    """Of a worker that decodes: all that its KV cache has."""
    preemptions: int = 0
    """Requests that lost their blocks to others and were computed again."""
    prompt_tokens: int = 0
    """Looked up in prefix caches."""
    cached_tokens: int = 0
    """Found there."""


class Run(msgspec.Struct):
    """One load on one arm."""

    arm: str
    kind: str
    rate: float
    seed: int
    classes: list[WorkClass]
    summary: Summary
    records: list[Record]
    shapes: list[StepShape] = []
    kv_bytes: int = 0
    """Moved between pools."""
    start_s: float = 0.0
    """That the arm's servers took to start."""
    held: Held | None = None
    """None: the teaching ways."""
    setup: Setup | None = None
    """None: the teaching ways."""


class Results(msgspec.Struct):
    """An experiment that was run."""

    title: str
    about: str
    model: str
    machine: str
    began: str
    runs: list[Run]
    skipped: dict[str, str] = {}
    """Arms that did not run, and why."""
    predictions: list[Prediction] = []
    goodput: dict[str, tuple[float, float]] = {}
    """By arm, the factors on the rates between which the highest lies that keeps enough requests within both limits."""

    @property
    def arms(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def rates(self) -> list[float]:
        return sorted({run.rate for run in self.runs})

    def of(self, arm: str, rate: float | None = None) -> list[Run]:
        """All repeats."""
        return [run for run in self.runs if run.arm == arm and rate in (None, run.rate)]

    def nearest_to_one(self, arm: str) -> list[Run]:
        """All repeats of an arm at the factor on the rates that is nearest to 1: what pictures show."""
        rate = min((run.rate for run in self.of(arm)), key=lambda rate: abs(math.log(rate)))
        return self.of(arm, rate)


COLUMNS = (
    "arm", "rate", "seed", "class", "offered", "whole", "refused", "good", "ttft_p50_s", "ttft_p99_s", "itl_p50_s",
    "itl_p99_s", "itl_max_s", "end_to_end_p50_s", "tokens_per_s", "kv_bytes",
)  # fmt: skip


def write_csv(results: Results, path: Path) -> None:
    """A row per run and class."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for run in results.runs:
            for row in (*run.summary.classes, run.summary.total):
                values: Sequence[object] = (
                    run.arm, run.rate, run.seed, row.name, row.offered, row.whole, row.rejected, row.good,
                    row.ttft_s.p50, row.ttft_s.p99, row.itl_s.p50, row.itl_s.p99, row.itl_s.max, row.end_to_end_s.p50,
                    row.tokens_per_s, run.kv_bytes,
                )  # fmt: skip
                writer.writerow("" if value is None else value for value in values)
