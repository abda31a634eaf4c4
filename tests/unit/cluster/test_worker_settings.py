import stat
from pathlib import Path
from typing import get_args

import pytest

from cluster.config import LivenessConfig, TransferConfig
from cluster.worker_settings import WorkerSettings, WorkerSettingsError, read_worker_settings, write_worker_settings
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.verification.block_checks import VERIFY_MODES


def settings(tmp_path: Path, bind_host: str = "") -> WorkerSettings:
    return WorkerSettings(
        worker_id="decode-1",
        role="decode",
        proxy_address="ipc:///run/proxy",
        runtime_dir=tmp_path,
        model="/models/m",
        engine={"max_model_len": 100, "hf_overrides": {"a": [1]}},
        transfer=TransferConfig(bind_host=bind_host),
        liveness=LivenessConfig(),
        start_timeout_s=10,
        stop_timeout_s=1,
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert read_worker_settings(write_worker_settings(settings(tmp_path))) == settings(tmp_path)


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    path = write_worker_settings(settings(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ranks_listen_in_the_runtime_directory_or_on_the_given_host(tmp_path: Path) -> None:
    assert settings(tmp_path).rank_bind == f"ipc://{tmp_path}/decode-1-kv"
    assert settings(tmp_path, "10.0.0.1").rank_bind == "tcp://10.0.0.1:0"
    assert settings(tmp_path).report_address != settings(tmp_path).rank_bind


def test_a_host_listens_where_ranks_on_other_nodes_reach_it(tmp_path: Path) -> None:
    far = settings(tmp_path, "10.0.0.1").model_copy(update={"across_nodes": True})
    assert far.report_address == "tcp://10.0.0.1:0"
    assert settings(tmp_path, "10.0.0.1").report_address == f"ipc://{tmp_path}/decode-1-host"


def test_a_document_of_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"worker_id": "decode-0", "colour": "red"}')
    with pytest.raises(WorkerSettingsError, match="do not fit this version"):
        read_worker_settings(path)
    with pytest.raises(WorkerSettingsError, match="cannot read"):
        read_worker_settings(tmp_path / "none.json")


def test_ranks_know_every_way_to_verify_that_can_be_configured() -> None:
    modes = get_args(TransferConfig.model_fields["verify"].annotation)
    assert modes == VERIFY_MODES
    for mode in modes:
        EndpointSettings(rank=0, bind="tcp://127.0.0.1:0", verify=TransferConfig(verify=mode).verify)
