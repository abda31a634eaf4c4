"""What a worker process is told when it starts.

The launcher writes one JSON document per worker into the runtime directory (mode 0600) and passes its path as
the only argument: `python -m prefill.worker SETTINGS.json`. Environment variables that must be set before the
worker imports torch or vLLM (core binding, KV space, devices) are in the process environment already.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.config import ChunkOrder, LivenessConfig, Role, TransferConfig
from cluster.settings_document import read_document, write_document
from cluster.trust import ClusterKey


class WorkerSettingsError(Exception):
    """The settings document is missing or not what this version of the worker expects."""


class HostSettings(BaseModel):
    """What every process of workers is told, real or simulated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    proxy_address: str = Field(description="ZMQ endpoint of the proxy's ROUTER.")
    runtime_dir: Path = Field(
        description="Private directory (0700) of this cluster run; ipc sockets and logs live here."
    )
    model: str = Field(description="Directory of the model, or a name vLLM resolves.")
    transfer: TransferConfig = Field(description="Links, leases, heartbeats between ranks.")
    liveness: LivenessConfig = Field(description="Heartbeats and the proxy's deadline.")
    prefix_events: bool = Field(default=True, description="Tell the proxy what the engine's prefix cache holds.")
    drain_timeout_s: float = Field(default=120.0, gt=0, description="Time to finish everything after SIGTERM.")
    across_nodes: bool = Field(default=False, description="Its ranks are Ray actors, which may be on other nodes.")
    ray_address: str = Field(default="", description="With across_nodes: HOST:PORT of the Ray cluster's head.")
    placement_group: str = Field(default="", description="With across_nodes: where its ranks are; hexadecimal digits.")
    key: ClusterKey | None = Field(
        default=None, repr=False, description="The cluster's key, where anything listens on tcp."
    )


class WorkerSettings(HostSettings):
    """Everything one worker host needs to know."""

    worker_id: str = Field(description="Unique in the cluster: `prefill-0`, `decode-1`.")
    role: Role
    engine: dict[str, Any] = Field(
        description="Keyword arguments of vLLM's AsyncEngineArgs, without `model` and `kv_transfer_config`; "
        "`tensor_parallel_size` is in here."
    )
    chunk_order: ChunkOrder = Field(default="deadline", description="Whose chunk the engine computes next.")
    itl_s: float = Field(
        default=0.1, gt=0, description="Steps with decodes in them hold as many prompt tokens as fit into this time."
    )
    niceness: int = Field(default=0, ge=0, le=19, description="How far its processes step back for others.")
    start_timeout_s: float = Field(gt=0, description="The engine must be up within this time.")
    stop_timeout_s: float = Field(ge=0, description="Time to leave after SIGINT; then the group is killed.")

    @property
    def rank_bind(self) -> str:
        """Where this worker's ranks export: `ipc://DIR/WORKER_ID-kv` (append the rank) or `tcp://HOST:0`."""
        if self.transfer.bind_host:
            return f"tcp://{self.transfer.bind_host}:0"
        return f"ipc://{self.runtime_dir}/{self.worker_id}-kv"

    @property
    def key_file(self) -> Path:
        """Where this worker's ranks find the key. vLLM logs what it is told, so they are told this path."""
        return self.runtime_dir / f"{self.worker_id}.key"

    @property
    def report_address(self) -> str:
        """Where the host listens for its ranks and its scheduler (`kvtransfer.host_messages`)."""
        if self.across_nodes:
            return f"tcp://{self.transfer.bind_host}:0"
        return f"ipc://{self.runtime_dir}/{self.worker_id}-host"

    @property
    def event_address(self) -> str:
        """Where the engine publishes what happens in its prefix cache."""
        return f"ipc://{self.runtime_dir}/{self.worker_id}-events"

    @property
    def replay_address(self) -> str:
        """Where the engine is asked for events that were missed."""
        return f"ipc://{self.runtime_dir}/{self.worker_id}-replay"


def write_worker_settings(settings: WorkerSettings) -> Path:
    """Writes the document into the runtime directory and returns its path."""
    return write_document(settings, settings.runtime_dir / f"{settings.worker_id}.json")


def read_worker_settings(path: Path) -> WorkerSettings:
    """Reads the document back; raises `WorkerSettingsError` with a sentence for the operator."""
    return read_document(WorkerSettings, path, "worker settings", "start workers with", WorkerSettingsError)
