"""The arms: vllm-router only where it is installed, and behind what it sends requests on to."""

from pathlib import Path

import pytest

from cluster.preflight.config_file import load_config
from lab.proxy_cost import arms as module
from lab.proxy_cost.arms import TWINPOOL, TWINPOOL_PD, VLLM, VLLM_IN_PROCESS, VLLM_ROUTED, arms


def test_the_router_is_left_out_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "router_command", lambda: "")
    names = [arm.name for arm in arms("/model", tmp_path, 0.0, with_pd=True)]
    assert names == [VLLM, VLLM_IN_PROCESS, TWINPOOL, TWINPOOL_PD]


def test_the_router_sends_requests_on_to_a_server_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "router_command", lambda: "/bin/vllm-router")
    found = {arm.name: arm for arm in arms("/model", tmp_path, 0.0, with_pd=False)}
    routed = found[VLLM_ROUTED]
    assert routed.behind == VLLM
    assert f"http://127.0.0.1:{found[VLLM].launch.port}" in routed.launch.command


@pytest.mark.parametrize("step_s", [0.0, 0.01])
def test_the_configurations_are_valid(tmp_path: Path, step_s: float) -> None:
    arms("/model", tmp_path, step_s, with_pd=True)
    one, pair = (load_config(tmp_path / f"{name}.yaml", []) for name in ("twinpool", "twinpool-1p1d"))
    assert one.simulation.enabled
    assert one.pools.prefill.replicas == 0
    assert pair.scheduling.remote_prefill_min_tokens == 128
    assert (one.simulation.speed == "instant") is (step_s == 0.0)
