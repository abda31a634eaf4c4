"""What a process of simulated workers is told when it starts: a JSON document (0600) in the runtime directory."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from cluster.config import Role, SimulationConfig
from cluster.settings_document import read_document, write_document
from cluster.worker_settings import HostSettings, WorkerSettingsError


class SimulatedWorkerName(BaseModel):
    """One of the workers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker_id: str = Field(description="Unique in the cluster: `prefill-0`, `decode-1`.")
    role: Role


class SimulatedSettings(HostSettings):
    """Everything that one process of simulated workers needs to know."""

    name: str = Field(description="Of the process: `simulated-0`.")
    workers: list[SimulatedWorkerName] = Field(min_length=1, description="Which live and die with this process.")
    max_model_len: int = Field(ge=1, description="Tokens of prompt and answer.")
    words: tuple[int, ...] = Field(min_length=1, description="Ids of the tokens that answers are made of.")
    simulation: SimulationConfig

    @property
    def peer_bind(self) -> str:
        """Where this process listens for other workers."""
        if self.transfer.bind_host:
            return f"tcp://{self.transfer.bind_host}:0"
        return f"ipc://{self.runtime_dir}/{self.name}-kv"


def write_simulated_settings(settings: SimulatedSettings) -> Path:
    """Writes the document into the runtime directory and returns its path."""
    return write_document(settings, settings.runtime_dir / f"{settings.name}.json")


def read_simulated_settings(path: Path) -> SimulatedSettings:
    """Reads the document back; raises `WorkerSettingsError` with a sentence for the operator."""
    return read_document(SimulatedSettings, path, "settings", "start workers with", WorkerSettingsError)
