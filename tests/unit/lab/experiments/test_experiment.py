from pathlib import Path

import pytest

from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from lab.experiments.arms import launches
from lab.experiments.experiment import (
    ContinuousArm,
    DisaggregatedArm,
    ExperimentError,
    load_experiment,
    shipped_names,
)

TWO_CORES = Machine(cores=(0, 1))


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_experiment_can_be_launched(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    assert experiment.about
    for arm in experiment.arms:
        servers = launches(arm, "model", experiment.engine, TWO_CORES, tmp_path)
        assert servers
        assert len({server.port for server in servers}) == len(servers)
        if isinstance(arm, DisaggregatedArm):
            load_config(Path(servers[0].command[-1]), [])  # raises what a cluster would refuse


def test_replicas_share_the_cores_evenly(tmp_path: Path) -> None:
    arm = ContinuousArm(name="two", kind="continuous", replicas=2)
    bound = [s.env["VLLM_CPU_OMP_THREADS_BIND"] for s in launches(arm, "m", {}, TWO_CORES, tmp_path)]
    assert bound == ["0", "1"]
    with pytest.raises(ExperimentError, match="3 replicas do not share 2 cores"):
        launches(ContinuousArm(name="three", kind="continuous", replicas=3), "m", {}, TWO_CORES, tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title: a\nwork: [chat=1/s\n", "no YAML"),
        ("title: a\nwork: [chat]\narms: [{name: x, kind: static}]\n", "the form is"),
        ("title: a\nwork: ['chat=1/s,1+1']\narms: [{name: x, kind: magic}]\n", "arms"),
        ("title: a\nwork: ['chat=1/s,1+1']\narms: [{name: x, kind: static}, {name: x, kind: static}]\n", "same name"),
        ("title: a\nwork: ['chat=1/s,1+1']\nspeed: 3\narms: [{name: x, kind: static}]\n", "speed"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ExperimentError, match=complaint):
        load_experiment(str(file))


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ExperimentError, match="slo-separation"):
        load_experiment("slo-seperation")
