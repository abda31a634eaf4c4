"""What a further API server process is told when it starts, and how it is started.

As for workers, one JSON document per process in the runtime directory (mode 0600, it holds the configuration with its
API key), whose path is the only argument.
"""

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from cluster.config import ClusterConfig
from cluster.launch.local import WorkerCommand
from cluster.settings_document import read_document, write_document
from proxy.api_servers.accept_loads import create_loads

ROLE = "api-server"
MODULE = "proxy.api_servers"


class ApiServerSettingsError(Exception):
    """The settings document is missing or not what this version expects."""


class ApiServerSettings(BaseModel):
    """Everything one process needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="`api-server-1`.")
    index: int = Field(ge=1, description="Its place among all API servers; the first one is beside the dispatcher.")
    runtime_dir: Path = Field(description="Private directory of this run.")
    listening_fd: int = Field(ge=0, description="The inherited socket to accept connections on.")
    model: str = Field(description="Directory of the model, or a name vLLM resolves.")
    config: ClusterConfig = Field(description="The whole configuration.")


def api_server_names(config: ClusterConfig) -> tuple[str, ...]:
    """Of all processes besides the first."""
    return tuple(f"{ROLE}-{index}" for index in range(1, config.server.api_servers))


def hub_address(runtime_dir: Path) -> str:
    """Where the dispatcher listens for them."""
    return f"ipc://{runtime_dir}/api-servers"


def loads_path(runtime_dir: Path) -> Path:
    """The file with everybody's number of connections."""
    return runtime_dir / "api-server-loads"


def metrics_dir(runtime_dir: Path) -> Path:
    """Where all API servers keep their metrics, for each of them to show."""
    return runtime_dir / "metrics"


def api_server_commands(
    config: ClusterConfig, model: str, runtime_dir: Path, listening: socket.socket, environ: Mapping[str, str]
) -> list[WorkerCommand]:
    """Writes what the processes share and their settings into the runtime directory; says how to start each."""
    names = api_server_names(config)
    if not names:
        return []
    create_loads(loads_path(runtime_dir), config.server.api_servers)
    metrics_dir(runtime_dir).mkdir(mode=0o700, exist_ok=True)
    env = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics_dir(runtime_dir))}
    commands = []
    for index, name in enumerate(names, start=1):
        settings = ApiServerSettings(
            name=name,
            index=index,
            runtime_dir=runtime_dir,
            listening_fd=listening.fileno(),
            model=model,
            config=config,
        )
        path = write_document(settings, runtime_dir / f"{name}.json")
        argv: Sequence[str] = (sys.executable, "-m", MODULE, str(path))
        log_path = runtime_dir / f"{name}.log"
        commands.append(WorkerCommand(name, ROLE, argv, env, log_path, noun="process", pass_fds=(listening.fileno(),)))
    return commands


def read_api_server_settings(path: Path) -> ApiServerSettings:
    """Reads the document back; raises `ApiServerSettingsError` with a sentence for the operator."""
    return read_document(ApiServerSettings, path, "API server settings", "they are written by", ApiServerSettingsError)
