"""Where the proxy listens, with which key, and how both reach the workers."""

import stat
from pathlib import Path
from types import MappingProxyType

import pytest
import zmq.auth

from cluster.config import ClusterConfig
from cluster.launch.local import worker_command
from cluster.launch.worker_plan import WorkerPlan
from cluster.preflight.config_file import load_config
from cluster.preflight.problems import ConfigError
from cluster.preflight.security_checks import security_problems
from cluster.simulated.launch import SimulatedPlanner, simulated_commands
from cluster.simulated.settings import read_simulated_settings
from cluster.trust import KeyFileError, cluster_key, new_key, proxy_address, read_key, with_trust, write_key
from cluster.worker_settings import read_worker_settings

PLAN = WorkerPlan(worker_id="decode-0", role="decode", engine={}, env={}, cores=())


def config(**changes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(changes)


def test_ipc_needs_no_key(tmp_path: Path) -> None:
    trusting = with_trust(config(), tmp_path)
    assert trusting == config()
    assert cluster_key(trusting) is None
    assert proxy_address(tmp_path, trusting.security) == f"ipc://{tmp_path}/proxy"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes", [{"security": {"workers_host": "127.0.0.1"}}, {"transfer": {"bind_host": "127.0.0.1"}}]
)
def test_what_listens_on_tcp_gets_a_new_key_for_the_run(tmp_path: Path, changes: dict[str, object]) -> None:
    safe = with_trust(config(**changes), tmp_path)
    assert cluster_key(safe) == read_key(tmp_path / "cluster.key")
    assert stat.S_IMODE((tmp_path / "cluster.key").stat().st_mode) == 0o600


def test_a_port_is_chosen_once_for_all(tmp_path: Path) -> None:
    safe = with_trust(config(security={"workers_host": "127.0.0.1"}), tmp_path)
    assert proxy_address(tmp_path, safe.security) == f"tcp://127.0.0.1:{safe.security.workers_port}"
    assert safe.security.workers_port > 0
    given = config(security={"workers_host": "127.0.0.1", "workers_port": 7777})
    assert with_trust(given, tmp_path).security.workers_port == 7777


def test_a_given_key_is_used(tmp_path: Path) -> None:
    key = new_key()
    path = write_key(tmp_path / "given", key)
    given = config(security={"workers_host": "127.0.0.1", "key_file": str(path)})
    assert cluster_key(with_trust(given, tmp_path)) == key
    assert not (tmp_path / "cluster.key").exists()
    path.chmod(0o604)
    with pytest.raises(KeyFileError, match="chmod 0600"):
        with_trust(given, tmp_path)
    (problem,) = security_problems(given, {})
    assert problem.field == "security.key_file"


def test_workers_get_the_key_in_their_documents_and_nowhere_else(tmp_path: Path) -> None:
    safe = with_trust(config(security={"workers_host": "127.0.0.1"}), tmp_path)
    key = cluster_key(safe)
    assert key is not None
    command = worker_command(PLAN, safe, "/models/m", tmp_path, MappingProxyType({"A": "b"}))
    settings = read_worker_settings(Path(command.argv[-1]))
    assert settings.key == key
    assert settings.proxy_address == proxy_address(tmp_path, safe.security)
    assert key.secret not in repr(settings)
    assert not any(key.secret in word for word in [*command.argv, *command.env.values()])
    assert stat.S_IMODE(Path(command.argv[-1]).stat().st_mode) == 0o600


def test_simulated_workers_get_it_too(tmp_path: Path) -> None:
    simulated = ClusterConfig.model_validate({"engine": "simulated", "security": {"workers_host": "127.0.0.1"}})
    safe = with_trust(simulated, tmp_path)
    tokenizer = tmp_path / "model"
    tokenizer.mkdir()
    (command, *_) = simulated_commands(SimulatedPlanner(safe).first(), safe, str(tokenizer), None, tmp_path, {})
    settings = read_simulated_settings(Path(command.argv[-1]))
    assert settings.key == cluster_key(safe)
    assert settings.proxy_address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("field", ["security.workers_host", "transfer.bind_host"])
def test_an_address_that_means_every_interface_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="the one by which other machines reach this one"):
        load_config(None, [f"{field}=0.0.0.0"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gateway.example"])
def test_a_public_api_server_without_a_key_is_refused(host: str) -> None:
    (problem,) = security_problems(config(server={"host": host}), {})
    assert problem.field == "server.options.api_key"
    assert "drain workers" in str(problem)
    assert not security_problems(config(server={"host": host, "options": {"api_key": "k"}}), {})
    assert not security_problems(config(server={"host": host}), {"VLLM_API_KEY": "k"})
    assert not security_problems(config(server={"host": host, "open_to_all": True}), {})
    assert not security_problems(config(server={"host": host, "options": {"uds": "/run/x"}}), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    assert not security_problems(config(server={"host": host}), {})


def test_what_pyzmq_writes_is_a_key_file(tmp_path: Path) -> None:
    _, secret = zmq.auth.create_certificates(tmp_path, "cluster")
    Path(secret).chmod(0o600)
    safe = with_trust(config(transfer={"bind_host": "127.0.0.1"}, security={"key_file": secret}), tmp_path)
    assert cluster_key(safe) is not None
