"""What is left of an experiment of which an arm fails."""

import os
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight.machine import Machine
from lab.experiments import run
from lab.experiments.experiment import Arm, Experiment
from lab.experiments.results import Results, Run
from lab.launches import twinpool
from lab.load.summary import summarize
from lab.server_process import Launch, ServerFailed

EXPERIMENT = Experiment.model_validate(
    {
        "title": "t",
        "work": ["chat=1/s,10+5"],
        "repeats": 3,
        "arms": [{"name": "a", "kind": "static"}, {"name": "b", "kind": "static"}],
    }
)


class NoServer:
    def __init__(self, launch: Launch, _log_dir: Path) -> None:
        self.name = launch.name

    def wait_until_healthy(self) -> None: ...
    def stop(self) -> None: ...


def test_the_runs_before_an_arm_fails_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def measure(_experiment: Experiment, arm: Arm, *given: Any) -> Run:
        seed, texts = given[-2:]
        told.append(texts)
        if (arm.name, seed) == ("a", 3):
            raise ServerFailed("it died")
        return Run(arm.name, arm.kind, 1.0, seed, [], summarize([], [], 1.0), [])

    told: list[int] = []
    monkeypatch.setattr(run, "Server", NoServer)
    monkeypatch.setattr(run, "_warm_up", lambda *_: None)
    monkeypatch.setattr(run, "_measure", measure)
    monkeypatch.setattr(run, "local_tokenizer", lambda _path: list)
    results = Results("t", "", "m", "machine", "now", [])
    run.run_experiment(EXPERIMENT, "model", Machine(cores=(0,)), tmp_path, results, lambda _text: None)
    assert [(r.arm, r.seed) for r in results.runs] == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3)]
    assert told == [0, 1, 2, 0, 1, 2], "no server is asked the same twice, and all arms are asked the same"
    assert results.skipped == {"a": "it died"}


def test_a_cluster_finds_its_configuration_wherever_the_command_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = twinpool("x", {"server": {"port": 1}}, Path())
    monkeypatch.chdir(os.sep)
    assert Path(launch.command[-1]).is_file()
