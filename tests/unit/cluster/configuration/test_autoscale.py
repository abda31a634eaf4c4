import pytest

from cluster.config import ClusterConfig
from cluster.launch.seats import BIND, NothingFree
from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine
from cluster.preflight.problems import ConfigError


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["autoscale.decode.min=3", "autoscale.decode.max=2"], "max=2 is less than min=3"),
        (["autoscale.every_s=30"], "at least four looks"),
        (["autoscale.enabled=true", "autoscale.decode.min=2"], "pools.decode.replicas=1 is not between"),
        (["autoscale.enabled=true", "autoscale.prefill.max=1", "pools.prefill.replicas=2"], "is not between"),
        (["autoscale.prefil.max=1"], "prefil"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(None, overrides)


def test_without_it_nothing_scales() -> None:
    assert not ClusterConfig().autoscale.enabled


def test_on_cpus_cores_are_kept_for_workers_to_come() -> None:
    config = load_config(None, ["autoscale.decode.max=3"])
    planner = WorkerPlanner(config, Machine(cores=(0, 1, 2, 3)))
    assert [plan.env[BIND] for plan in planner.first()] == ["0", "1"]
    assert planner.devices == 4
    assert [planner.next("decode").env[BIND] for _ in range(2)] == ["2", "3"]
    with pytest.raises(NothingFree, match=r"a larger autoscale\.decode\.max"):
        planner.next("decode")
