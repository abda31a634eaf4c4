from pathlib import Path

import pytest

from cluster.launch.worker_plan import CPU_CHUNK_TOKENS
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from lab.experiments.arms import launches, setup
from lab.experiments.experiment import (
    ContinuousArm,
    DisaggregatedArm,
    ExperimentError,
    load_experiment,
    shipped_names,
)
from proxy.dispatch.settings import dispatch_settings

TWO_CORES = Machine(cores=(0, 1))


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_experiment_can_be_launched(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    assert experiment.about
    for arm in experiment.arms:
        servers = launches(experiment, arm, "model", TWO_CORES, tmp_path)
        assert servers
        assert len({server.port for server in servers}) == len(servers)
        if isinstance(arm, DisaggregatedArm):
            config = load_config(Path(servers[0].command[-1]), [])  # raises what a cluster would refuse
            limits = {work.name: (work.ttft_s, work.itl_s) for work in experiment.classes(arm, 1)}
            assert {name: (kind.ttft_s, kind.itl_s) for name, kind in config.slo.classes.items()} == limits


def test_replicas_share_the_cores_evenly(tmp_path: Path) -> None:
    experiment = load_experiment("slo-separation")
    arm = ContinuousArm(name="two", kind="continuous", replicas=2)
    servers = launches(experiment, arm, "m", TWO_CORES, tmp_path)
    bound = [server.env["VLLM_CPU_OMP_THREADS_BIND"] for server in servers]
    assert bound == ["0", "1"]
    with pytest.raises(ExperimentError, match="3 replicas do not share 2 cores"):
        launches(experiment, ContinuousArm(name="three", kind="continuous", replicas=3), "m", TWO_CORES, tmp_path)


def test_a_class_that_an_arm_configures_keeps_what_it_says(tmp_path: Path) -> None:
    experiment = load_experiment("slo-separation")
    slo = {"on_overload": "reject", "classes": {"chat": {"ttft_s": 2.5, "priority": -1}}}
    arm = DisaggregatedArm(name="mine", kind="disaggregated", config={"slo": slo})
    (server,) = launches(experiment, arm, "m", TWO_CORES, tmp_path)
    config = load_config(Path(server.command[-1]), []).slo
    chat, report = config.classes["chat"], config.classes["report"]
    assert (chat.ttft_s, chat.itl_s, chat.priority) == (2.5, 0.1, -1)
    assert (report.ttft_s, report.itl_s) == (8, 0.2)
    assert config.on_overload == "reject"


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


def test_what_a_cluster_is_simulated_with_is_what_it_would_do(tmp_path: Path) -> None:
    experiment = load_experiment("pd-ratio")
    for arm in experiment.arms:
        (server,) = launches(experiment, arm, "model", TWO_CORES, tmp_path)
        config = load_config(Path(server.command[-1]), [])
        made = setup(experiment, arm, TWO_CORES)
        assert made is not None
        assert (made.num_prefill, made.num_decode) == (config.pools.prefill.replicas, config.pools.decode.replicas)
        assert made.remote_min_tokens == dispatch_settings(config, on_gpu=False).policy.remote_prefill_min_tokens
        assert made.chunk_tokens == CPU_CHUNK_TOKENS
